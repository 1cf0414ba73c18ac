"""The live workers of one front door, by model, and their connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from attrs import define, evolve

from commutator.engine.contract import EngineClient
from commutator.errors import CommutatorError
from commutator.types import Role, WorkerRecord

__all__ = ["LiveWorker", "WorkerView"]

log = logging.getLogger(__name__)

_RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@define(eq=False)
class LiveWorker:
    """A worker in the view. It is routed to only while ``connected`` and not draining."""

    record: WorkerRecord
    client: EngineClient
    connected: bool = False
    reconnecting: asyncio.Task[None] | None = None
    gone: str | None = None
    """Why it left the view, once it has."""
    announced: bool = False
    """Whether everybody was told of it; not if that was cut short."""


class WorkerView:
    """Keeps one connected client for each worker that the registry knows."""

    def __init__(self, on_routable: Callable[[], None] = lambda: None) -> None:
        """``on_routable`` is called when a worker may have become routable."""
        self._workers: dict[str, LiveWorker] = {}
        self._on_routable = on_routable

    def get(self, worker_id: str) -> LiveWorker | None:
        return self._workers.get(worker_id)

    def all(self) -> list[LiveWorker]:
        return list(self._workers.values())

    def routable(self, model: str, *, prefill: bool = False) -> list[LiveWorker]:
        """Workers that can take a request for ``model``, ordered by worker id.

        ``prefill``: those that take nothing but the prefill of requests that are decoded elsewhere.
        """
        return [
            worker
            for worker in self._workers.values()
            if worker.connected
            and (record := worker.record).model == model
            and not record.draining
            and (record.role is Role.PREFILL) is prefill
        ]

    async def put(self, record: WorkerRecord, client: EngineClient) -> LiveWorker:
        """Add a worker, or replace one of the same id, and connect to it."""
        old = self._workers.pop(record.worker_id, None)
        worker = LiveWorker(record, client)
        self._workers[record.worker_id] = worker
        self._workers = dict(sorted(self._workers.items()))
        if old is not None:
            await _dismiss(old, "replaced")
        await self._connect(worker)
        if not worker.connected:
            self.lost(worker)
        return worker

    def change(self, worker: LiveWorker, *, draining: bool, role: Role) -> None:
        """The registry says so of a worker that is there."""
        worker.record = evolve(worker.record, draining=draining, role=role)
        self._on_routable()

    async def remove(self, worker_id: str, reason: str) -> LiveWorker | None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            await _dismiss(worker, reason)
        return worker

    def lost(self, worker: LiveWorker) -> None:
        """The connection failed: route around the worker, and try to reach it again."""
        worker.connected = False
        if worker.reconnecting is None and worker.gone is None:
            worker.reconnecting = asyncio.create_task(self._reconnect(worker))

    async def close(self) -> None:
        for worker_id in list(self._workers):
            await self.remove(worker_id, "the front door ends")

    async def _connect(self, worker: LiveWorker) -> None:
        try:
            info = await worker.client.start()
        except CommutatorError as error:
            log.warning("worker %s: %s", worker.record.worker_id, error)
            return
        worker.record = evolve(worker.record, info=info)
        worker.connected = True
        self._on_routable()

    async def _reconnect(self, worker: LiveWorker) -> None:
        attempt = 0
        while not worker.connected:
            await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
            await self._connect(worker)
            attempt += 1
        worker.reconnecting = None


async def _dismiss(worker: LiveWorker, reason: str) -> None:
    worker.connected = False
    worker.gone = reason
    if worker.reconnecting is not None:
        worker.reconnecting.cancel()
    await worker.client.close()
