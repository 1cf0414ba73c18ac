"""Limiters: what counts the requests of principals against their limits.

A limiter has a part in each front door, and, where front doors count together, a service beside
the supervisor.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from attrs import define, frozen

from commutator.contract.principal import Principal
from commutator.contract.service import Hub, Service
from commutator.contract.settings import setting

__all__ = ["Limiter", "LimiterConfig", "LimiterContext", "RequestLimiter", "Standing", "Ticket"]


@define(eq=False)  # one or two for each request; frozen ones take three times as long to fill
class Standing:
    """How far a principal is from its limits, right after a request was admitted or refused."""

    limit_requests: int | None = None
    """Requests a minute; None without such a limit, and so for the next two."""
    remaining_requests: int | None = None
    """Of them, those that are left now."""
    reset_requests_s: float | None = None
    """Seconds until all of the limit is free again if no further request comes."""
    limit_tokens: int | None = None
    """Tokens a minute; a day where only a limit for the day is set. None without either."""
    remaining_tokens: int | None = None
    """Of them, those that are left now."""
    reset_tokens_s: float | None = None
    """Seconds, as ``reset_requests_s``."""


class Ticket(ABC):
    """A request that was admitted and charged."""

    __slots__ = ()

    @property
    @abstractmethod
    def standing(self) -> Standing:
        """How far its principal is from its limits: not further than this."""


class RequestLimiter(ABC):
    """Counts the requests of one front door: each begins, is admitted, and ends.

    Every request of the front door comes here, on its event loop: ``begin`` and ``end`` do no I/O,
    and ``admit`` seldom waits.
    """

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        """To be set once requests can be counted, together with what counts from before: the front
        door opens then."""

    @abstractmethod
    def begin(self, principal: Principal) -> bool:
        """A request begins. Whether it counts: ``end`` is called then, however it ends.

        A principal may have no limits: a limiter with a limit of its own for everybody counts it
        as well. Raises ``commutator.errors.RateLimitError`` where it is certain already that the
        request is refused; then it does not count.
        """

    @abstractmethod
    async def admit(
        self,
        principal: Principal,
        prompt_tokens: int,
        answers: int = 1,
        max_tokens: int | None = None,
    ) -> Ticket:
        """Charge a request that began and counts, once, if it is within the limits.

        ``prompt_tokens`` is the sum of its prompts, ``answers`` how many it asks for, and
        ``max_tokens`` the longest answer as the client stated it, None if it did not.

        Raises RateLimitError, or ``commutator.errors.RegistryError`` while it cannot be known
        whether it is. A request whose asking is cancelled is not charged.
        """

    @abstractmethod
    def end(self, principal: Principal, ticket: Ticket | None, tokens: int | None) -> None:
        """A request that counts ended after ``tokens``, prompts and answers together.

        ``ticket`` is None if it was not admitted, ``tokens`` if it reached no worker: both cost
        nothing.
        """

    async def run(self) -> None:
        """Work beside the requests until cancelled: stay in touch with the service. Idle here."""


@frozen(kw_only=True)
class LimiterConfig:
    """What counts requests against the limits of principals; each plugin adds its options."""

    kind: str = setting("The limiter plugin.")


@frozen(kw_only=True)
class LimiterContext:
    """Where a ``RequestLimiter`` counts."""

    door: str
    """The front door's name: no other of the deployment has it, and it has it again after a
    restart."""
    alone: bool
    """Whether the deployment has no other front door, so that nobody else counts."""
    hub: Hub
    """The way to the limiter's service."""


class Limiter(ABC):
    """Both halves of a limiter. One instance in each front door, another beside the supervisor."""

    @abstractmethod
    def at_door(self, context: LimiterContext) -> RequestLimiter:
        """What counts in a front door. Called once, in the event loop that uses it.

        Not called where nobody is asked who they are: then nobody has limits.
        """

    def service(self) -> Service | None:
        """What front doors count together by; None: nothing. Called once beside each supervisor.

        It is connected to only where front doors share: see ``LimiterContext.hub``. What it keeps
        outlives every front door, so a front door that is alone may keep a copy of its counts
        there.
        """
        return None
