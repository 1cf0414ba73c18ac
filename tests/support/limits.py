"""Requests of principals with limits, without a front door around them."""

from __future__ import annotations

from commutator.contract.limiter import RequestLimiter, Ticket
from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError

__all__ = ["ask", "settle"]

_SOMEBODY = Principal(name="somebody", limits=Limits(tokens_per_day=1))


async def ask(
    door: RequestLimiter, principal: str, limits: Limits, tokens: int
) -> Ticket | RateLimitError:
    """Ask for a request of so many tokens, though nothing in hand refuses it. May raise others."""
    try:
        return await door.admit(Principal(name=principal, limits=limits), tokens, max_tokens=0)
    except RateLimitError as refusal:
        return refusal


def settle(door: RequestLimiter, ticket: Ticket, tokens: int | None) -> None:
    """End a request that ``ask`` was answered for."""
    door.begin(_SOMEBODY)  # whose requests are in hand is of no matter here
    door.end(_SOMEBODY, ticket, tokens)
