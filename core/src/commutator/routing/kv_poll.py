"""Asks the workers now and then what they count of their storage tiers."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from commutator.errors import CommutatorError
from commutator.kv.counters import KvStatistics
from commutator.routing.view import LiveWorker, WorkerView

__all__ = ["KvPoll"]

log = logging.getLogger(__name__)

_EVERY_S = 2.0


class KvPoll:
    """``statistics`` has the last answer of each worker that is there and keeps blocks in tiers."""

    def __init__(self, view: WorkerView, every_s: float = _EVERY_S) -> None:
        self._view = view
        self._every_s = every_s
        self.statistics: dict[str, KvStatistics] = {}

    async def run(self) -> None:
        """Without end."""
        while True:
            await self.ask()
            await asyncio.sleep(self._every_s)

    async def ask(self) -> None:
        """Ask every worker once, all at the same time."""
        workers = [worker for worker in self._view.all() if worker.connected]
        answers = await asyncio.gather(*(self._ask(worker) for worker in workers))
        self.statistics = {
            worker.record.worker_id: answer
            for worker, answer in zip(workers, answers, strict=True)
            if answer is not None
        }

    async def _ask(self, worker: LiveWorker) -> KvStatistics | None:
        worker_id = worker.record.worker_id
        try:
            answer = await worker.client.kv_admin("statistics", timeout_s=self._every_s)
            return msgspec.convert(answer, KvStatistics)
        except (CommutatorError, msgspec.ValidationError) as error:
            log.debug("worker %s: %s", worker_id, error)
            return None
