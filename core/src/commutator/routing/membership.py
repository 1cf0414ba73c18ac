"""Follows the registry: keeps the workers of each model up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Protocol

from commutator.contract.engine import EngineClient, EngineConfig
from commutator.contract.registry import Change, WorkerUp
from commutator.contract.worker import Role, WorkerRecord
from commutator.engine import TokenApiClient
from commutator.plugins import PluginHost
from commutator.routing.disagg.prefill_pool import IncompatiblePair, WorkerCompatibility
from commutator.routing.model import ModelRouting
from commutator.routing.workers import LiveWorker, LiveWorkers

log = logging.getLogger(__name__)

_LOGGED_PAIRS = 8


class Membership:
    """Connects to workers, and announces them to policies, indexers and plugins.

    ``engines`` and ``models`` are those of the configuration, by name. Used from one event loop;
    changes of one worker are applied one after another.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineConfig],
        models: Mapping[str, ModelRouting],
        workers: LiveWorkers,
        compatibility: WorkerCompatibility,
        host: PluginHost,
    ) -> None:
        self._engines = engines
        self._models = models
        self._workers = workers
        self._compatibility = compatibility
        self._host = host
        self._ignored: dict[str, WorkerRecord] = {}
        """Workers of engines that are not known, by worker id."""

    async def worker_up(self, record: WorkerRecord) -> None:
        """Add a worker that is new in the registry, or apply a change of a known one."""
        known = self._workers.get(record.worker_id)
        if known is not None and _same_process(known.record, record) and known.announced:
            self._change(known, record)
            return
        config = self._engines.get(record.engine)
        if config is None:
            log.error("worker %s ignored: its engine %s is not in this front door's configuration",
                      record.worker_id, record.engine)  # fmt: skip
            self._ignored[record.worker_id] = record
            return
        client = self._client(config, record)
        if client is None:
            log.error("worker %s ignored: it speaks the protocol of its engine %s, whose plugin is "
                      "not installed here; install its package, such as commutator-%s",
                      record.worker_id, config.kind, config.kind)  # fmt: skip
            return
        client.expect(record)
        worker = await self._workers.put(record, client)
        if (model := self._models.get(record.model)) is not None:
            for indexer in model.indexers():
                await indexer.add(record)
        worker.announced = True
        self._log_incompatible(worker.record)
        if not record.draining:
            self._host.worker_up(record)

    async def look_again(self) -> None:
        """The engines have changed: some workers that were ignored may be known now."""
        for worker_id in [
            name for name, one in self._ignored.items() if one.engine in self._engines
        ]:
            if (record := self._ignored.pop(worker_id, None)) is not None:
                await self.worker_up(record)

    def _client(self, config: EngineConfig, record: WorkerRecord) -> EngineClient | None:
        kind = self._host.engines.kinds.get(config.kind)
        if kind is not None:
            return kind.thing.connect(config, record.address)
        return TokenApiClient(record.address) if record.token_api else None

    async def worker_down(self, worker_id: str, reason: str) -> None:
        """Remove a worker that left the registry: it gets nothing new.

        Its requests migrate or fail at once, but where only the lease lapsed: see
        ``LiveWorkers.remove``.
        """
        self._ignored.pop(worker_id, None)
        worker = await self._workers.remove(worker_id, reason)
        if worker is None:
            return
        if (model := self._models.get(worker.record.model)) is not None:
            model.forget(worker_id)
            for indexer in model.indexers():
                await indexer.remove(worker_id)
        if not worker.record.draining:  # draining: the hook was called when it began to drain
            self._host.worker_down(worker.record, reason)

    def refused_handovers(self, most: int = 100) -> list[IncompatiblePair]:
        """Pairs of a prefill worker and a worker of its model that cannot take its KV.

        At most ``most`` of them: there can be as many as workers squared.
        """
        records = (worker.record for worker in self._workers.all())
        return list(islice(self._compatibility.incompatible(records), most))

    def _change(self, worker: LiveWorker, record: WorkerRecord) -> None:
        known = worker.record
        if (known.draining, known.role) == (record.draining, record.role):
            return
        self._workers.change(worker, draining=record.draining, role=record.role)
        if known.role is not record.role:
            if (model := self._models.get(known.model)) is not None:
                model.forget(known.worker_id)
            self._log_incompatible(worker.record)
        if known.draining and not record.draining:
            self._host.worker_up(worker.record)
        elif record.draining and not known.draining:
            self._host.worker_down(worker.record, "draining")

    def _log_incompatible(self, worker: WorkerRecord) -> None:
        """Log with which others a new worker cannot exchange KV; a few of them."""
        prefills = worker.role is Role.PREFILL
        others = [
            other.record
            for other in self._workers.all()
            if (other.record.role is Role.PREFILL) is not prefills
        ]
        for pair in islice(self._compatibility.incompatible([worker, *others]), _LOGGED_PAIRS):
            log.warning("%s", pair)


def _same_process(known: WorkerRecord, record: WorkerRecord) -> bool:
    """A restarted worker may get the address that it had: ports are used again."""
    return (known.address, known.instance) == (record.address, record.instance)


_LONGEST_RETRY_S = 30.0


class WorkerSink(Protocol):
    """Applies changes of workers; ``Membership`` is one."""

    async def worker_up(self, record: WorkerRecord) -> None: ...

    async def worker_down(self, worker_id: str, reason: str) -> None: ...


class WorkerFollower:
    """Applies the changes of each worker in order; a slow worker does not delay the others.

    A newer change of a worker cancels the one in progress. Adding a worker that failed is tried
    again after ``retry_s``, then with growing pauses, until a newer change of that worker.
    """

    def __init__(self, sink: WorkerSink, *, retry_s: float = 1.0) -> None:
        self.informed = asyncio.Event()
        """Set once all workers of the first batch have been applied."""
        self._sink = sink
        self._retry_s = retry_s
        self._applying: dict[str, asyncio.Task[None]] = {}

    async def run(self, batches: AsyncIterator[Sequence[Change]]) -> None:
        """Apply every batch, until cancelled."""
        async for batch in batches:
            begun = [self._begin(change) for change in batch]
            if not self.informed.is_set():
                await asyncio.gather(*begun, return_exceptions=True)
                self.informed.set()

    async def close(self) -> None:
        tasks = list(self._applying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, change: Change) -> asyncio.Task[None]:
        worker_id = change.record.worker_id if isinstance(change, WorkerUp) else change.worker_id
        return self._start(worker_id, self._apply(change, self._applying.get(worker_id)))

    def _start(self, worker_id: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._applying[worker_id] = task
        task.add_done_callback(lambda done: self._forget(worker_id, done))
        return task

    def _forget(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._applying.get(worker_id) is task:
            del self._applying[worker_id]

    async def _apply(self, change: Change, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        if await self._applied(change) or not isinstance(change, WorkerUp):
            return
        worker_id = change.record.worker_id
        if self._applying.get(worker_id) is asyncio.current_task():  # no newer change has come
            # A separate task, because ``run`` may wait for this one.
            self._start(worker_id, self._try_again(change))

    async def _try_again(self, change: WorkerUp) -> None:
        pause_s = self._retry_s
        while True:
            await asyncio.sleep(pause_s)
            if await self._applied(change):
                return
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def _applied(self, change: Change) -> bool:
        try:
            if isinstance(change, WorkerUp):
                await self._sink.worker_up(change.record)
            else:
                await self._sink.worker_down(change.worker_id, change.reason)
        except Exception:
            log.exception("applying a change of a worker failed: %r", change)
            return False
        return True
