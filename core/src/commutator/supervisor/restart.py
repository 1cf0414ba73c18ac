"""Restarts a supervised process whenever it ends, with back-off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from attrs import frozen

from commutator.backoff import Backoff
from commutator.contract.launcher import LaunchedProcess
from commutator.errors import CommutatorError

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class ProcessEndedError(CommutatorError):
    """A process that was needed ended; the message says how."""


@frozen
class Ended:
    """How one run of a process ended."""

    reason: str
    """Completes a sentence that begins with the process's name."""
    healthy_s: float
    """Seconds for which it had been ready."""


async def keep_running(
    name: str,
    live_once: Callable[[], Awaitable[Ended]],
    backoff: Backoff,
    on_end: Callable[[Ended, float], None] = lambda _ended, _wait_s: None,
) -> None:
    """Restart ``name`` each time it ends, until cancelled or until ``live_once`` raises.

    ``on_end`` is given how it ended and the seconds until it is started again.
    """
    while True:
        ended = await live_once()
        backoff, wait_s = backoff.after_failure(ended.healthy_s)
        log.warning("%s %s; starting it again in %.1f s", name, ended.reason, wait_s)
        on_end(ended, wait_s)
        await asyncio.sleep(wait_s)


async def while_alive(
    process: LaunchedProcess | None,
    work: Coroutine[Any, Any, ResultT],
    hangs: Coroutine[Any, Any, str] | None = None,
) -> ResultT:
    """The result of ``work``. Raises ProcessEndedError as soon as ``process``, if any, ends.

    ``hangs``: ``LaunchedProcess.end_when_it_hangs``, where it is to be noticed.
    """
    working = asyncio.ensure_future(work)
    if process is None:
        return await working
    ends = [asyncio.ensure_future(one) for one in (hangs, process.wait()) if one is not None]
    try:
        await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ProcessEndedError(next(end.result() for end in ends if end.done()))
    finally:
        for task in (working, *ends):
            task.cancel()
        await asyncio.gather(working, *ends, return_exceptions=True)
