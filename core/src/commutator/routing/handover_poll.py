"""Asks the workers now and then what they count of their hand-overs."""

from __future__ import annotations

import asyncio
import logging

from commutator.engine.handover import HandoverStatistics
from commutator.errors import CommutatorError
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import Role

__all__ = ["HandoverPoll"]

log = logging.getLogger(__name__)

_EVERY_S = 2.0


class HandoverPoll:
    """``statistics`` has the last answer of each worker that is there and counts any.

    Nobody is asked before there is a prefill worker.
    """

    def __init__(self, view: WorkerView, every_s: float = _EVERY_S) -> None:
        self._view = view
        self._every_s = every_s
        self._needed = False
        self.statistics: dict[str, HandoverStatistics] = {}

    async def run(self) -> None:
        """Without end."""
        while True:
            await self.ask()
            await asyncio.sleep(self._every_s)

    async def ask(self) -> None:
        """Ask every worker once, all at the same time."""
        workers = self._view.all()
        # Once there was one, roles change and old counters go on being told.
        self._needed |= any(worker.record.role is Role.PREFILL for worker in workers)
        if not self._needed:
            return
        asked = [worker for worker in workers if worker.connected and worker.record.info.handover]
        answers = await asyncio.gather(*(self._ask(worker) for worker in asked))
        self.statistics = {
            worker.record.worker_id: answer
            for worker, answer in zip(asked, answers, strict=True)
            if answer is not None
        }

    async def _ask(self, worker: LiveWorker) -> HandoverStatistics | None:
        try:
            return await worker.client.handover_statistics(timeout_s=self._every_s)
        except CommutatorError as error:
            log.debug("worker %s: %s", worker.record.worker_id, error)
            return None
