"""Lets a limited number of requests run; a limited number waits, in order of arrival.

This protects the front-door process: its memory and its event loop. The workers are protected by
``commutator.routing.admission``, which knows how busy they are, and priorities. A request that
waits there has stepped aside here, so that the two limits do not add up: a full deployment must
not keep out the urgent request that could be the next to get a worker.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from itertools import count
from types import TracebackType

from attrs import define, field

from commutator.errors import OverloadedError

__all__ = ["Admission", "AdmissionQueue", "Limiter"]


class Admission(Enum):
    """What becomes of a request that arrives."""

    RUN = auto()
    WAIT = auto()
    REFUSE = auto()


@define
class AdmissionQueue:
    """Who runs and who waits. Pure; a ticket is any number that is not in use."""

    max_running: int
    max_waiting: int
    running: int = 0
    _waiting: dict[int, None] = field(factory=dict)
    """A dict keeps order, and anyone may leave it in constant time."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def arrive(self, ticket: int) -> Admission:
        if self.running < self.max_running:
            self.running += 1
            return Admission.RUN
        if len(self._waiting) < self.max_waiting:
            self._waiting[ticket] = None
            return Admission.WAIT
        return Admission.REFUSE

    def finish(self) -> int | None:
        """A running request is over, or steps aside. Returns the ticket that runs now instead."""
        self.running -= 1
        first = next(iter(self._waiting), None)
        if first is None or self.running >= self.max_running:
            return None
        del self._waiting[first]
        self.running += 1
        return first

    def step_back(self) -> None:
        """Who stepped aside runs again, even if more run then than otherwise may."""
        self.running += 1

    def give_up(self, ticket: int) -> bool:
        """Stop waiting. False when the ticket does not wait any more: it runs already."""
        return self._waiting.pop(ticket, ticket) is None


class Limiter:
    """The asyncio side of ``AdmissionQueue``: who is inside ``async with`` it holds a place."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.queue = AdmissionQueue(max_running, max_waiting)
        self._tickets = count()
        self._turns: dict[int, asyncio.Future[None]] = {}

    async def __aenter__(self) -> None:
        """Take one of the places. Raises OverloadedError when the queue is full."""
        ticket = next(self._tickets)
        admission = self.queue.arrive(ticket)
        if admission is Admission.REFUSE:
            raise OverloadedError(
                f"{self.queue.running} requests run and {self.queue.waiting} wait: "
                "the queue is full; try again soon"
            )
        if admission is Admission.WAIT:
            await self._wait(ticket)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def stepped(self, change: int) -> None:
        """A running request stepped aside (1) or came back (-1)."""
        if change > 0:
            self._leave()
        else:
            self.queue.step_back()

    async def _wait(self, ticket: int) -> None:
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if not self.queue.give_up(ticket):
                self._leave()  # its turn had come already
            raise
        finally:
            del self._turns[ticket]

    def _leave(self) -> None:
        ticket = self.queue.finish()
        if ticket is not None and not self._turns[ticket].done():
            self._turns[ticket].set_result(None)
