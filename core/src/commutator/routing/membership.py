"""Keeps routing in step with the registry: workers come, change, and go."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from commutator.config.model import EngineConfig
from commutator.plugins import PluginHost
from commutator.routing.handover_pairs import HandoverPairs, RefusedPair
from commutator.routing.model_workers import ModelWorkers
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import WorkerRecord

__all__ = ["Membership"]

log = logging.getLogger(__name__)


class Membership:
    """Connects to workers, and tells policies, caches and plugins of them.

    Of ``engines`` and ``models`` it has what the configuration names, by name. Used from one event
    loop; changes of one worker come one after the other.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineConfig],
        models: Mapping[str, ModelWorkers],
        view: WorkerView,
        pairs: HandoverPairs,
        host: PluginHost,
    ) -> None:
        self._engines = engines
        self._models = models
        self._view = view
        self._pairs = pairs
        self._host = host

    async def worker_up(self, record: WorkerRecord) -> None:
        """The registry has a new worker, or a change of a known one."""
        known = self._view.get(record.worker_id)
        if known is not None and known.record.address == record.address and known.announced:
            self._change(known, record)
            return
        config = self._engines.get(record.engine)
        if config is None:
            log.error("worker %s names engine %s, which is not configured here; ignored",
                      record.worker_id, record.engine)  # fmt: skip
            return
        connector = self._host.engines.kinds[config.kind].thing
        worker = await self._view.put(record, connector.connect(config, record.address))
        if (model := self._models.get(record.model)) is not None:
            for cache in model.caches():
                await cache.add(record)
        worker.announced = True
        self._tell_refusals(record.worker_id)
        if not record.draining:
            self._host.worker_up(record)

    async def worker_down(self, worker_id: str, reason: str) -> None:
        """The registry lost a worker; its running requests go elsewhere, or fail, at once."""
        worker = await self._view.remove(worker_id, reason)
        if worker is None:
            return
        if (model := self._models.get(worker.record.model)) is not None:
            model.forget(worker_id)
            for cache in model.caches():
                await cache.remove(worker_id)
        if not worker.record.draining:  # otherwise it left routing before
            self._host.worker_down(worker.record, reason)

    def refused_handovers(self) -> list[RefusedPair]:
        """Prefill workers whose KV some other worker cannot take."""
        return self._pairs.refused(worker.record for worker in self._view.all())

    def _change(self, worker: LiveWorker, record: WorkerRecord) -> None:
        known = worker.record
        if (known.draining, known.role) == (record.draining, record.role):
            return
        self._view.change(worker, draining=record.draining, role=record.role)
        if known.role is not record.role:
            if (model := self._models.get(known.model)) is not None:
                model.forget(known.worker_id)
            self._tell_refusals(record.worker_id)
        if known.draining and not record.draining:
            self._host.worker_up(worker.record)
        elif record.draining and not known.draining:
            self._host.worker_down(worker.record, "draining")

    def _tell_refusals(self, worker_id: str) -> None:
        for pair in self.refused_handovers():
            if worker_id in {pair.prefill_worker, pair.decode_worker}:
                log.warning("%s", pair)
