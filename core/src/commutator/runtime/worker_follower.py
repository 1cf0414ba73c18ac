"""Applies the registry's changes to a front door's dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Protocol

from commutator.runtime.lease import Change, Up
from commutator.types import WorkerRecord

__all__ = ["WorkerFollower", "WorkerSink"]

log = logging.getLogger(__name__)

_LONGEST_RETRY_S = 30.0


class WorkerSink(Protocol):
    """What is told of workers; a ``Dispatcher``."""

    async def worker_up(self, record: WorkerRecord) -> None: ...

    async def worker_down(self, worker_id: str, reason: str) -> None: ...


class WorkerFollower:
    """Changes of one worker are applied in order; a worker that is slow to reach delays no other.

    A newer change of a worker cuts short the one still being applied. A worker that cannot be taken
    in is tried again, after ``retry_s`` and then ever less often, until something newer is known.
    """

    def __init__(self, sink: WorkerSink, *, retry_s: float = 1.0) -> None:
        self.informed = asyncio.Event()
        """Set once everything that was there at the beginning has been applied."""
        self._sink = sink
        self._retry_s = retry_s
        self._applying: dict[str, asyncio.Task[None]] = {}

    async def run(self, batches: AsyncIterator[Sequence[Change]]) -> None:
        """Apply every batch, without end."""
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
        worker_id = change.record.worker_id if isinstance(change, Up) else change.worker_id
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
        if await self._applied(change) or not isinstance(change, Up):
            return
        worker_id = change.record.worker_id
        if self._applying.get(worker_id) is asyncio.current_task():  # and nothing newer is known
            # Not here, where somebody may wait: the others are to be served meanwhile.
            self._start(worker_id, self._try_again(change))

    async def _try_again(self, change: Up) -> None:
        pause_s = self._retry_s
        while True:
            await asyncio.sleep(pause_s)
            if await self._applied(change):
                return
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def _applied(self, change: Change) -> bool:
        try:
            if isinstance(change, Up):
                await self._sink.worker_up(change.record)
            else:
                await self._sink.worker_down(change.worker_id, change.reason)
        except Exception:
            log.exception("a change of a worker could not be applied: %r", change)
            return False
        return True
