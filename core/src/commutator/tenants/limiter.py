"""A front door's way to the ledger: its own if it is alone, otherwise that at the hub.

A front door that is alone decides without asking anybody, and copies what changed in its accounts
to the ledger at the hub a few times a second. Of several, each asks that ledger for every request
of a principal with limits. While it cannot be reached it admits none of them, so that limits are
never exceeded; requests of other principals are not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from attrs import define, field

from commutator.backoff import Backoff
from commutator.contract.principal import Limits
from commutator.errors import RegistryError
from commutator.frames import FrameProtocol
from commutator.registry.hub import Hub
from commutator.tenants.ledger import Ledger, Moment, Refusal, Standing
from commutator.tenants.service import (
    SERVICE,
    now,
    pack_account,
    pack_limits,
    unpack_accounts,
    unpack_answer,
)

__all__ = [
    "LocalLimiter",
    "RequestLimiter",
    "SharedLimiter",
]

log = logging.getLogger(__name__)

_RECONNECT = Backoff(first_s=0.05, longest_s=2.0)
_ANSWER_TIMEOUT_S = 2.0
_COPY_INTERVAL_S = 0.2
_MAX_UNSETTLED = 100_000


class RequestLimiter(ABC):
    """Admits and settles the requests of one front door."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        """Set once requests can be counted, together with what counts from before."""

    @abstractmethod
    async def admit(
        self, principal: str, limits: Limits, tokens: int
    ) -> tuple[int, Standing | Refusal]:
        """Charge a request of ``tokens``; returns its ticket, and whether it is within the limits.

        Of a refused request nothing is charged, and the ticket means nothing. Raises RegistryError
        when the ledger cannot be asked. A request whose asking is cancelled is not charged.
        """

    @abstractmethod
    def settle(self, ticket: int, tokens: int | None) -> None:
        """A request ended after ``tokens``; None: it reached no worker, and costs nothing."""

    @abstractmethod
    async def run(self) -> None:
        """Stay in touch with the supervisor's ledger until cancelled."""


class LocalLimiter(RequestLimiter):
    """The ledger of a front door that is alone.

    With a ``hub``, ``run`` keeps a copy there.
    """

    def __init__(
        self, door: str, hub: Hub | None = None, clock: Callable[[], Moment] = now
    ) -> None:
        super().__init__()
        self._clock = clock
        self._door = door
        self._ledger = Ledger()
        self._ledger.door_opened(door, "")
        self._numbers = itertools.count(1)
        self._changed: set[str] = set()
        """Principals whose accounts differ from the copy."""
        self._copied = False
        """Whether this connection's copy has all accounts."""
        self._link: _Link | None = None
        if hub is None:
            self.ready.set()
        else:
            self._link = _Link(hub, door, self._on_frame, lambda: None)
            self._link.on_open = self._opened

    async def admit(
        self, principal: str, limits: Limits, tokens: int
    ) -> tuple[int, Standing | Refusal]:
        ticket, at = next(self._numbers), self._clock()
        answer = self._ledger.admit(self._door, ticket, principal, limits, tokens, at)
        if self._link is not None:
            self._changed.add(principal)
        return ticket, answer

    def settle(self, ticket: int, tokens: int | None) -> None:
        principal = self._ledger.settle(self._door, ticket, tokens, self._clock())
        if self._link is not None and principal is not None:
            self._changed.add(principal)

    async def run(self) -> None:
        if self._link is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run())
            group.create_task(self._copy(self._link))

    def _opened(self) -> list[int]:
        self._copied = False
        return []

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "opened", int(day), list(accounts)]:
                if not self.ready.is_set():
                    self._ledger.restore(day, unpack_accounts(accounts), self._clock())
                    self.ready.set()
            case _:
                raise ValueError("unknown frame")

    async def _copy(self, link: _Link) -> None:
        await self.ready.wait()
        while True:
            await asyncio.sleep(_COPY_INTERVAL_S)
            if link.connection is None or (self._copied and not self._changed):
                continue
            if self._copied:
                day, accounts = self._ledger.changes(self._changed, self._clock())
            else:
                day, accounts = self._ledger.accounts(self._clock())
            packed = [pack_account(one) for one in accounts]
            link.connection.send([SERVICE, "changes", day, packed])
            self._copied = True
            self._changed.clear()


@define
class _Question:
    answer: asyncio.Future[Standing | Refusal]
    asked_s: float = field(factory=lambda: asyncio.get_running_loop().time())


class SharedLimiter(RequestLimiter):
    """Asks the ledger at the hub."""

    def __init__(self, door: str, hub: Hub) -> None:
        super().__init__()
        self._link = _Link(hub, door, self._on_frame, self._on_lost)
        self._link.on_open = self._opened
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._open: set[int] = set()
        self._unsettled: deque[tuple[int, int | None]] = deque(maxlen=_MAX_UNSETTLED)
        """Requests that ended while the ledger could not be reached."""

    async def admit(
        self, principal: str, limits: Limits, tokens: int
    ) -> tuple[int, Standing | Refusal]:
        connection = self._link.connection
        if connection is None:
            raise _unreachable()
        ticket = next(self._numbers)
        question = _Question(asyncio.get_running_loop().create_future())
        self._questions[ticket] = question
        connection.send([SERVICE, "admit", ticket, principal, pack_limits(limits), tokens])
        try:
            answer = await question.answer
        except BaseException:
            connection.send([SERVICE, "settle", ticket, None])
            raise
        finally:
            del self._questions[ticket]
        if isinstance(answer, Standing):
            self._open.add(ticket)
        return ticket, answer

    def settle(self, ticket: int, tokens: int | None) -> None:
        self._open.discard(ticket)
        if self._link.connection is None:
            self._unsettled.append((ticket, tokens))
        else:
            self._link.connection.send([SERVICE, "settle", ticket, tokens])

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run())
            group.create_task(self._end_waiting())

    def _opened(self) -> list[int]:
        return [*self._open, *(ticket for ticket, _ in self._unsettled)]

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, int(ticket), standing, limit, retry_after_s]:
                question = self._questions.get(ticket)
                if question is not None and not question.answer.done():
                    question.answer.set_result(unpack_answer(standing, limit, retry_after_s))
            case [_, "opened", *_]:
                self.ready.set()
                while self._unsettled and self._link.connection is not None:
                    ticket, tokens = self._unsettled.popleft()
                    self._link.connection.send([SERVICE, "settle", ticket, tokens])
            case _:
                raise ValueError("unknown frame")

    def _on_lost(self) -> None:
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(_unreachable())

    async def _end_waiting(self) -> None:
        """One timer for all questions costs less than one for each."""
        while True:
            await asyncio.sleep(_ANSWER_TIMEOUT_S / 4)
            oldest_s = asyncio.get_running_loop().time() - _ANSWER_TIMEOUT_S
            for question in self._questions.values():
                if question.asked_s < oldest_s and not question.answer.done():
                    question.answer.set_exception(_unreachable())


def _unreachable() -> RegistryError:
    return RegistryError(
        "the ledger of limits cannot be reached, and without it no request is admitted that "
        "counts against limits; try again soon"
    )


class _Link:
    """A connection to the ledger that comes back by itself, and opens the door each time."""

    def __init__(
        self,
        hub: Hub,
        door: str,
        on_frame: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.connection: FrameProtocol | None = None
        """None while the ledger cannot be reached."""
        self.on_open: Callable[[], list[int]] = list
        """Returns the tickets of the requests that run or still are to be settled."""
        self._hub = hub
        self._door = door
        self._incarnation = uuid4().hex
        self._on_frame = on_frame
        self._on_lost = on_lost

    async def run(self) -> None:
        backoff = _RECONNECT
        while True:
            lost = asyncio.Event()
            try:
                connection = await self._hub.connect(self._take, lost.set)
            except RegistryError as error:
                log.log(logging.DEBUG if backoff.failures else logging.WARNING, "%s", error)
            else:
                backoff = _RECONNECT
                try:
                    connection.send(
                        [SERVICE, "open", self._door, self._incarnation, self.on_open()]
                    )
                    self.connection = connection
                    await lost.wait()
                finally:
                    self.connection = None
                    connection.close()
                    self._on_lost()
                log.warning("limits: the connection to the hub was lost; reconnecting")
            backoff, wait_s = backoff.after_failure(0.0)
            await asyncio.sleep(wait_s)

    def _take(self, frame: list[Any]) -> None:
        try:
            self._on_frame(frame)
        except (TypeError, ValueError) as error:
            log.warning("limits: the ledger sent a wrong frame: %.200s", error)
