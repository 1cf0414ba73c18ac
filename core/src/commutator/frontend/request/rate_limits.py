"""The headers by which clients know how far they are from their limits, as OpenAI names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from multidict import istr

from commutator.contract.limiter import Standing

__all__ = ["RATE_LIMIT_HEADERS", "as_duration", "rate_limits"]

RATE_LIMIT_HEADERS = tuple(
    istr(f"x-ratelimit-{what}-{of}")  # not folded anew for each answer
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
_STANDINGS = 8192
"""Whose headers are remembered: requests within one allowance have one."""


@lru_cache(_STANDINGS)
def rate_limits(standing: Standing) -> Mapping[str, str]:
    """The headers of those limits that there are."""
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
