"""The time limit of a request, and that of all when the front door ends."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from types import TracebackType

from aiohttp import web

from commutator.errors import DeadlineError, RequestError

__all__ = ["TIMEOUT_HEADER", "TimeLimit", "TimeLimits", "timeout_of"]

TIMEOUT_HEADER = "X-Request-Timeout-S"

_LAST_WORDS_S = 1.0
_POLL_S = 0.02


def timeout_of(request: web.Request, longest_s: float) -> float:
    """Seconds that the client gives the request, never more than ``longest_s``.

    Raises RequestError when the header is not a positive number.
    """
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0:  # also false for NaN
        raise RequestError(
            f"{TIMEOUT_HEADER}: expected a number of seconds above 0, got {given[:40]!r}",
            TIMEOUT_HEADER,
        )
    return min(timeout_s, longest_s)


class TimeLimits:
    """Those of all requests that run, so that they can be ended together."""

    def __init__(self) -> None:
        self._running: set[TimeLimit] = set()
        self._last_s: float | None = None

    def of(self, timeout_s: float) -> TimeLimit:
        """For one request; it counts as running while it is inside."""
        return TimeLimit(timeout_s, self)

    async def end_within(self, timeout_s: float) -> None:
        """What runs, and what still comes, may take so long and no longer; returns when it is over.

        Waits a little longer for what does not heed its limit.
        """
        last_s = self._last_s = asyncio.get_running_loop().time() + timeout_s
        for limit in self._running:
            limit.cut(last_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(last_s + _LAST_WORDS_S):
                while self._running:  # noqa: ASYNC110 - only the end waits, so nobody tells it
                    await asyncio.sleep(_POLL_S)

    def begun(self, limit: TimeLimit) -> None:
        self._running.add(limit)
        if self._last_s is not None:
            limit.cut(self._last_s)

    def ended(self, limit: TimeLimit) -> None:
        self._running.discard(limit)


class TimeLimit:
    """Cancel what is inside after ``timeout_s`` and raise DeadlineError instead."""

    def __init__(self, timeout_s: float, limits: TimeLimits) -> None:
        self._limits = limits
        self._timer = asyncio.timeout(timeout_s)
        self._why = f"the request took longer than its {timeout_s:g} s"

    @property
    def deadline_s(self) -> float | None:
        """By the event loop's clock; known inside."""
        return self._timer.when()

    def cut(self, last_s: float) -> None:
        """End no later than ``last_s``, by the event loop's clock: the front door ends."""
        when_s = self._timer.when()
        if when_s is not None and last_s < when_s and not self._timer.expired():
            self._timer.reschedule(last_s)
            self._why = "this front door is shutting down and could not wait any longer; try again"

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()
        self._limits.begun(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._limits.ended(self)
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(self._why) from late
