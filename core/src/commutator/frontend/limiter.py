"""Lets a limited number of requests run; a limited number waits, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from itertools import count

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
        """A running request is over. Returns the ticket that takes its place, if one waits."""
        first = next(iter(self._waiting), None)
        if first is None:
            self.running -= 1
        else:
            del self._waiting[first]
        return first

    def give_up(self, ticket: int) -> bool:
        """Stop waiting. False when the ticket does not wait any more: it runs already."""
        return self._waiting.pop(ticket, ticket) is None


class Limiter:
    """The asyncio side of ``AdmissionQueue``."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.queue = AdmissionQueue(max_running, max_waiting)
        self._tickets = count()
        self._turns: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the places. Raises OverloadedError when the queue is full."""
        ticket = next(self._tickets)
        admission = self.queue.arrive(ticket)
        if admission is Admission.REFUSE:
            raise OverloadedError(
                f"{self.queue.running} requests run and {self.queue.waiting} wait: "
                "the queue is full; try again soon"
            )
        if admission is Admission.WAIT:
            await self._wait(ticket)
        try:
            yield
        finally:
            self._leave()

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
