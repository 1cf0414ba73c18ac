"""The time limit of a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from commutator.errors import DeadlineError, RequestError

__all__ = ["TIMEOUT_HEADER", "time_limit", "timeout_of"]

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


@asynccontextmanager
async def time_limit(timeout_s: float) -> AsyncIterator[None]:
    """Cancel what is inside after ``timeout_s`` and raise DeadlineError instead."""
    timer = asyncio.timeout(timeout_s)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise DeadlineError(f"the request took longer than its {timeout_s:g} s") from error
