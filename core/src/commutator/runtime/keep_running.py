"""What every supervised process has in common: it is started again, for ever, with back-off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from attrs import frozen

from commutator.errors import CommutatorError
from commutator.runtime.backoff import Backoff
from commutator.runtime.process import Process

__all__ = ["Ended", "ProcessEndedError", "keep_running", "while_alive"]

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class ProcessEndedError(CommutatorError):
    """A process ended although it was needed; the message says how."""


@frozen
class Ended:
    """One life of a process is over."""

    reason: str
    """Completes a sentence that begins with the process's name."""
    healthy_s: float
    """How long it had been ready."""


async def keep_running(
    name: str, live_once: Callable[[], Awaitable[Ended]], backoff: Backoff
) -> None:
    """Start ``name`` again and again; ends only by cancellation or an error of ``live_once``."""
    while True:
        ended = await live_once()
        backoff, wait_s = backoff.after_failure(ended.healthy_s)
        log.warning("%s %s; starting it again in %.1f s", name, ended.reason, wait_s)
        await asyncio.sleep(wait_s)


async def while_alive(process: Process | None, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``. Raises ProcessEndedError as soon as ``process``, if any, ends."""
    working = asyncio.ensure_future(work)
    if process is None:
        return await working
    exited = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({working, exited}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ProcessEndedError(exited.result())
    finally:
        for task in (working, exited):
            task.cancel()
        await asyncio.gather(working, exited, return_exceptions=True)
