"""The headers by which OpenAI's clients know how far they are from their limits."""

from __future__ import annotations

import math
from functools import lru_cache

from multidict import CIMultiDict, istr

from commutator.frontend import MeteredRequest, Standing

__all__ = ["RATE_LIMIT_HEADERS", "add_rate_limits", "as_duration"]

RATE_LIMIT_HEADERS = tuple(
    istr(f"x-ratelimit-{what}-{of}")  # not folded anew for each answer
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
_STANDINGS = 1024
"""Whose headers are remembered: those that are charged together have one."""


def add_rate_limits(headers: CIMultiDict[str], metered: MeteredRequest) -> None:
    """Add the headers of those limits that there are, once the request is admitted or refused."""
    if metered.standing is not None:
        headers.update(_headers(metered.standing))


@lru_cache(_STANDINGS)
def _headers(standing: Standing) -> dict[str, str]:
    headers: dict[str, str] = {}
    if standing.limit_requests is not None:
        limit, remaining, reset = RATE_LIMIT_HEADERS[:3]
        headers[limit] = str(standing.limit_requests)
        headers[remaining] = str(standing.remaining_requests)
        headers[reset] = as_duration(standing.reset_requests_s or 0.0)
    if standing.limit_tokens is not None:
        limit, remaining, reset = RATE_LIMIT_HEADERS[3:]
        headers[limit] = str(standing.limit_tokens)
        headers[remaining] = str(standing.remaining_tokens)
        headers[reset] = as_duration(standing.reset_tokens_s or 0.0)
    return headers


def as_duration(seconds: float) -> str:
    """In whole seconds, rounded up, as OpenAI writes it: 0s, 59s, 6m0s, 1h0m7s."""
    minutes, whole = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{whole}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
