"""Runs a call on a tier's thread, between its jobs, and brings the result back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

from commutator.errors import TierError
from commutator.kv.peer_export import OnTier
from commutator.kv.tier_thread import JobUrgency, TierThread
from commutator.kv.tier_worker import TierWorker

__all__ = ["on_tier"]

ResultT = TypeVar("ResultT")


def on_tier(thread: TierThread, urgency: JobUrgency = JobUrgency.FREE) -> OnTier:
    """What ``PeerExport`` needs. The future raises TierError while the tier is not open."""

    def run(call: Callable[[], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()

        def job(worker: TierWorker | None) -> Generator[None, None, None]:
            if future.set_running_or_notify_cancel():
                try:
                    if worker is None:
                        raise TierError("the tier is not open")  # noqa: TRY301
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - whoever waits for it decides
                    future.set_exception(error)
            yield from ()

        thread.submit(urgency, job)
        return future

    return run
