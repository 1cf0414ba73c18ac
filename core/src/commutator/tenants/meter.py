"""Meters a front door's requests: each is charged when it begins and settled when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from attrs import define, field

from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError
from commutator.tenants.ledger import Refusal, Standing, tokens_charged
from commutator.tenants.limiter import LocalLimiter, RequestLimiter, Ticket

__all__ = [
    "Meter",
    "MeteredRequest",
]

_REFUSED_FOR_S = 1.0
"""For this long a principal without requests left is refused unread: a flood costs no parsing."""
_MAX_REFUSED = 10_000
_UNITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "concurrent_requests": "requests at the same time",
}


@define
class Meter:
    """Begins the metering of each request; ``limiter`` counts."""

    limiter: RequestLimiter = field(factory=lambda: LocalLimiter("frontend-0"))
    _clock: Callable[[], float] = time.monotonic
    in_hand: dict[str, int] = field(factory=dict)
    """Requests of principals with limits that this front door has, admitted or not yet: those in
    its queue, too."""
    _refused: dict[str, tuple[float, Refusal]] = field(factory=dict)
    """(until when, why) of principals that have no requests left in this minute."""

    def begin(self, principal: Principal) -> MeteredRequest | None:
        """A request begins; None for a principal without limits that count.

        Its end must be said to what is returned. Raises RateLimitError where it is certain already
        that the request is refused.
        """
        limits, name = principal.limits, principal.name
        most = limits.concurrent_requests
        if most is None and not _counts_tokens_or_requests(limits):
            return None
        if self._refused and (known := self._refused.get(name)) is not None:
            until_s, refusal = known
            if self._clock() < until_s:
                raise rate_limit_error(principal, refusal)
            del self._refused[name]
        in_hand = self.in_hand.get(name, 0)
        if most is not None and in_hand >= most:
            raise rate_limit_error(
                principal, Refusal("concurrent_requests", _REFUSED_FOR_S, Standing())
            )
        self.in_hand[name] = in_hand + 1
        return MeteredRequest(self, principal)

    def refused(self, principal: Principal, refusal: Refusal) -> None:
        """Remember a refusal that also later requests would meet."""
        if refusal.limit == "requests_per_minute" and refusal.retry_after_s is not None:
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            until_s = self._clock() + min(_REFUSED_FOR_S, refusal.retry_after_s)
            self._refused[principal.name] = (until_s, refusal)


class MeteredRequest:
    """One request of a principal with limits, from its beginning to ``end``."""

    standing: Standing | None = None
    """How far the principal is from its limits, once the request is admitted or refused; what was
    charged ahead for later requests counts as used."""
    tokens: int | None = None
    """Prompt and generated tokens, once a worker has begun; without it nothing is charged."""
    _ticket: Ticket | None = None

    def __init__(self, meter: Meter, principal: Principal) -> None:
        self._meter = meter
        self._principal = principal

    async def admit(
        self, prompt_tokens: int, answers: int = 1, max_tokens: int | None = None
    ) -> None:
        """Charge the request, once.

        ``max_tokens`` is the longest answer as the client stated it, None if it did not. Raises
        RateLimitError, or RegistryError when the limits cannot be checked.
        """
        principal, limiter = self._principal, self._meter.limiter
        name, limits = principal.name, principal.limits
        tokens = tokens_charged(limits, prompt_tokens, answers, max_tokens)
        answer = limiter.take(name, limits, tokens) or await limiter.admit(name, limits, tokens)
        if isinstance(answer, Refusal):
            self.standing = answer.standing
            self._meter.refused(principal, answer)
            raise rate_limit_error(principal, answer, tokens)
        self._ticket, self.standing = answer, answer.standing

    def end(self) -> None:
        """Settle the request. Called once, however it ends."""
        meter, name = self._meter, self._principal.name
        if left := meter.in_hand[name] - 1:
            meter.in_hand[name] = left
        else:
            del meter.in_hand[name]
        if self._ticket is not None:
            meter.limiter.settle(self._ticket, self.tokens)


def rate_limit_error(
    principal: Principal, refusal: Refusal, tokens: int | None = None
) -> RateLimitError:
    """What the client is told."""
    most, unit = getattr(principal.limits, refusal.limit), _UNITS[refusal.limit]
    text = f"rate limit of {principal.name}: {most} {unit}"
    if refusal.retry_after_s is None:
        text += f"; this request may take {tokens}: shorten it, or state a lower max_tokens"
    elif refusal.limit == "concurrent_requests":
        text += "; wait for one to end"
    else:
        text += f"; try again in {math.ceil(refusal.retry_after_s)} s"
    return RateLimitError(text, refusal.limit, refusal.retry_after_s)


def _counts_tokens_or_requests(limits: Limits) -> bool:
    return (
        limits.requests_per_minute is not None
        or limits.tokens_per_minute is not None
        or limits.tokens_per_day is not None
    )
