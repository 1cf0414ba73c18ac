"""The prefill of a request that is decoded elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError
from commutator.routing.handover_observer import HandoverObserver, LegOutcome
from commutator.routing.leg import Leg
from commutator.routing.speeds import SpeedMeter
from commutator.routing.view import WorkerView
from commutator.types import FinishReason

__all__ = ["HandoverFailedError", "PrefillLeg"]


class HandoverFailedError(Exception):
    """One of two legs failed, because of ``cause``. Both are stopped by when it is caught."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.at_s = time.perf_counter()


class PrefillLeg:
    """Runs as a task of its own from when it is made. ``stop`` it on every way out."""

    def __init__(
        self, model: str, leg: Leg, view: WorkerView, meter: SpeedMeter, observer: HandoverObserver
    ) -> None:
        self.handed: Mapping[str, Any] | None = None
        """What its worker said for the decode leg, once it has ended."""
        self.cached_tokens = 0
        """Prompt tokens that its worker found in its KV cache."""
        self.ended_s: float | None = None
        """When it ended well, by ``time.perf_counter``."""
        self.error: Exception | None = None
        """Why it failed, once it has."""
        self._model = model
        self._leg = leg
        self._view = view
        self._meter = meter
        self._observer = observer
        self._began_s = time.perf_counter()
        self._told = False
        self.task = asyncio.create_task(self._run())

    @property
    def worker_id(self) -> str:
        return self._leg.worker_id

    @property
    def unwanted(self) -> bool:
        """Whether the decode side had let go of the hand-over before this began.

        Then its leg says what is to be known: it has failed, or had everything in its own cache.
        """
        return isinstance(self.error, EngineHandoverError)

    def check(self) -> None:
        """Raises HandoverFailedError if it has failed."""
        if self.error is not None:
            raise HandoverFailedError(self.error)

    async def stop(self) -> None:
        """Abort it if it still runs. Idempotent."""
        self.task.cancel()
        await asyncio.wait({self.task})
        await self._end("cancelled")

    async def _run(self) -> None:
        try:
            await self._read()
        except Exception as error:  # noqa: BLE001 - whoever waits for the task looks at it
            if isinstance(error, EngineUnavailableError):
                self._view.lost(self._leg.worker)
            self.error = error
            await self._end("failed")
        else:
            self.ended_s = time.perf_counter()
            ahead = self._leg.route.candidate.load.active_prefill_tokens
            tokens = ahead + self._leg.ticket.prefill_tokens
            self._meter.prefill.add(tokens, self.ended_s - self._began_s)
            await self._end("done")

    async def _read(self) -> None:
        async for delta in self._leg.stream:
            if delta.cached_tokens is not None:
                self.cached_tokens = delta.cached_tokens
            self._leg.account(delta)
            if delta.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
                raise EngineError(delta.error or f"worker {self.worker_id} ended the prefill")
            if delta.finish_reason is not None:
                self.handed = delta.handover
                return
        raise self._leg.cut_off()

    async def _end(self, outcome: LegOutcome) -> None:
        if not self._told:
            self._told = True
            self._observer.leg_ended(self._model, "prefill", outcome)
            await self._leg.stream.aclose()
            self._leg.release(self.error)
