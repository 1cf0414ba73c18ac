"""The time limit of a request."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from aiohttp import web

from commutator.errors import DeadlineError, RequestError

__all__ = ["TIMEOUT_HEADER", "TimeLimit", "timeout_of"]

TIMEOUT_HEADER = "X-Request-Timeout-S"


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


class TimeLimit:
    """Cancel what is inside after ``timeout_s`` and raise DeadlineError instead."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer = asyncio.timeout(timeout_s)

    @property
    def deadline_s(self) -> float | None:
        """By the event loop's clock; known inside."""
        return self._timer.when()

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            text = f"the request took longer than its {self._timeout_s:g} s"
            raise DeadlineError(text) from late
