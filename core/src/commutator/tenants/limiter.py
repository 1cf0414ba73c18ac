"""A front door's way to the ledger: its own if it is alone, otherwise that at the hub.

A front door that is alone decides without asking anybody, and copies what changed in its accounts
to the ledger at the hub a few times a second. Of several, each asks that ledger for the requests
of principals with limits. In both, those of a principal that sends many and is far from its limits
are admitted some at a time, ahead. While the ledger cannot be reached none of them are admitted, so
that limits are never exceeded; requests of other principals are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
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
    left_of_second_s,
    now,
    pack_account,
    pack_limits,
    settled_unused,
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
_COUNTED_S = 1.0
"""The requests of this time say how many tickets are asked for ahead."""
_FEWEST_AHEAD = 2
_SETTLE_INTERVAL_S = 0.2
"""Requests that end are reported together, unless the ledger may need to know."""
_MOST_AHEAD = 256


@define(eq=False)
class _Sender:
    """What this front door knows of one principal that sends requests."""

    limits: Limits
    since_s: float
    """Its requests are counted from then on, and anew after ``_COUNTED_S``."""
    requests: int = 0
    """Since then."""
    before: int = 0
    """In the time before that."""
    until_s: float = 0.0
    """Until when the tickets can be used: the end of a second of the ledger's clock."""
    next: int = 0
    end: int = 0
    """The tickets from ``next`` to ``end``, without that, were admitted ahead and are not used."""
    charged: int = 0
    """The tokens that each of them was charged."""
    standing: Standing = field(factory=Standing)
    """What the next of them leaves."""
    most_tokens: int = 0
    """Of one request since ``since_s``."""
    most_before: int = 0
    """In the time before that."""
    had_ahead: bool = False
    """Whether the ledger ever admitted tickets ahead."""

    def came(self, tokens: int, now_s: float) -> None:
        """A request of ``tokens`` came."""
        if now_s - self.since_s >= _COUNTED_S:
            is_next = now_s - self.since_s < 2 * _COUNTED_S
            self.before, self.most_before = (self.requests, self.most_tokens) if is_next else (0, 0)
            self.since_s, self.requests, self.most_tokens = now_s, 0, 0
        self.requests += 1
        self.most_tokens = max(self.most_tokens, tokens)

    def take(self, limits: Limits, tokens: int, now_s: float) -> Standing | None:
        """Use the next ticket for a request of ``tokens`` that came; None: there is none for it.

        Returns how far the principal is from its limits then.
        """
        if (
            not self.has_ahead(now_s)
            or tokens > self.charged
            or (self.limits is not limits and self.limits != limits)
        ):
            return None
        self.came(tokens, now_s)
        self.next += 1
        known = self.standing
        requests, tokens_left = known.remaining_requests, known.remaining_tokens
        known = self.standing = Standing(
            known.limit_requests,
            None if requests is None else max(0, requests - 1),
            known.reset_requests_s,
            known.limit_tokens,
            None if tokens_left is None else max(0, tokens_left - self.charged),
            known.reset_tokens_s,
        )
        return known

    def got(self, first: int, count: int, charged: int, standing: Standing, until_s: float) -> None:
        """The ledger admitted ``count`` tickets ahead, from ``first`` on; none are left of others.

        ``standing`` is that of before.
        """
        self.next, self.end = first, first + count
        self.charged, self.standing, self.until_s = charged, standing, until_s

    def has_ahead(self, now_s: float) -> bool:
        """Whether there are tickets that can be used."""
        return self.next != self.end and now_s < self.until_s

    def wanted(self, now_s: float) -> int:
        """How many tickets to ask for ahead: those of about all requests until they lapse."""
        left_s = (self.until_s - now_s) % 1.0
        expected = max(self.requests, self.before) * left_s / _COUNTED_S
        if expected < _FEWEST_AHEAD:
            return 0
        return min(int(expected + math.sqrt(expected)), _MOST_AHEAD)

    @property
    def each(self) -> int:
        """The tokens to ask for with each of them: few requests are larger."""
        most = max(self.most_tokens, self.most_before)
        return most + most // 8


class RequestLimiter(ABC):
    """Admits and settles the requests of one front door.

    Those of a principal that sends many and is far from its limits are admitted some at a time,
    ahead: then a request takes a ticket, and its end is reported with those of others.
    """

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        """Set once requests can be counted, together with what counts from before."""
        self._next = 1
        """The next ticket."""
        self._senders: dict[str, _Sender] = {}
        """The principals that sent requests lately."""
        self._open: dict[int, str] = {}
        """The principals of the requests that run."""
        self._ended: list[tuple[int, int | None]] = []
        """Requests that ended and are to be settled soon."""
        self._unused: list[tuple[int, int]] = []
        """From and to which tickets, without the latter, are to be given back soon."""
        self._settling: asyncio.TimerHandle | None = None

    async def admit(
        self, principal: str, limits: Limits, tokens: int
    ) -> tuple[int, Standing | Refusal]:
        """Charge a request of ``tokens``; returns its ticket, and whether it is within the limits.

        Of a refused request nothing is charged, and the ticket means nothing. Raises RegistryError
        when the ledger cannot be asked. A request whose asking is cancelled is not charged.
        """
        now_s = self._now_s()
        sender = self._senders.get(principal)
        if sender is not None and (standing := sender.take(limits, tokens, now_s)) is not None:
            ticket = sender.next - 1
            self._open[ticket] = principal
            return ticket, standing
        return await self._ask(principal, limits, tokens, now_s)

    @abstractmethod
    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> tuple[int, Standing | Refusal]:
        """As ``admit``, of the ledger."""

    def settle(self, ticket: int, tokens: int | None) -> None:
        """A request ended after ``tokens``; None: it reached no worker, and costs nothing."""
        principal = self._open.pop(ticket, None)
        sender = None if principal is None else self._senders.get(principal)
        self._ended.append((ticket, tokens))
        if sender is None or sender.next == sender.end:
            self._report()  # the principal may be near its limits

    @abstractmethod
    def _report(self) -> None:
        """Have the ledger settle what ended and what was not used."""

    @abstractmethod
    def _now_s(self) -> float:
        """By a clock that never goes back."""

    @abstractmethod
    async def run(self) -> None:
        """Stay in touch with the supervisor's ledger until cancelled."""

    def _asking(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> tuple[_Sender, int]:
        """The sender of a request that the ledger is asked for, and how many more to ask for."""
        sender = self._senders.get(principal)
        if sender is None:
            sender = self._senders[principal] = _Sender(limits, now_s)
        sender.came(tokens, now_s)
        self._settle_later()
        if sender.limits == limits and sender.has_ahead(now_s):
            return sender, 0  # this request alone is too large for them
        self._give_back(sender)
        self._report()
        sender.limits = limits
        return sender, sender.wanted(now_s)

    def _give_back(self, sender: _Sender | None) -> None:
        """Settle what ``sender`` does not use."""
        if sender is not None and sender.next < sender.end:
            self._unused.append((sender.next, sender.end))
            sender.next = sender.end

    def _settle_later(self) -> None:
        """Keep reporting while there are senders."""
        if self._settling is None:
            loop = asyncio.get_running_loop()
            self._settling = loop.call_later(_SETTLE_INTERVAL_S, self._settle_some)

    def _settle_some(self) -> None:
        """Give back what was not used in time, and report what ended."""
        now_s = self._now_s()
        for principal, sender in [*self._senders.items()]:
            if now_s >= sender.until_s:
                self._give_back(sender)
            if now_s - sender.since_s >= 2 * _COUNTED_S:
                self._forget(principal)
        self._report()
        self._settling = None
        if self._senders:
            self._settle_later()

    def _forget(self, principal: str) -> None:
        """Give back what the principal does not use."""
        self._give_back(self._senders.pop(principal, None))
        self._report()


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

    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> tuple[int, Standing | Refusal]:
        sender, wanted = self._asking(principal, limits, tokens, now_s)
        ledger, door, at, ticket = self._ledger, self._door, self._clock(), self._next
        answer = ledger.admit(door, ticket, principal, limits, tokens, at)
        if isinstance(answer, Refusal) and (sender.next < sender.end or self._ended):
            self._give_back(sender)
            self._report()
            answer = ledger.admit(door, ticket, principal, limits, tokens, at)
        self._next += 1
        self._differ([principal])
        if isinstance(answer, Refusal):
            return ticket, answer
        self._open[ticket] = principal
        if wanted:
            first, each = self._next, sender.each
            given = ledger.admit_ahead(door, first, wanted, principal, limits, each, at)
            self._next += given
            sender.got(first, given, each, answer, now_s + left_of_second_s(at))
        return ticket, answer

    def _report(self) -> None:
        if not self._ended and not self._unused:
            return
        ended = self._ended + settled_unused(self._unused)
        self._ended, self._unused = [], []
        self._differ(self._ledger.settle(self._door, ended, self._clock()))

    def _differ(self, principals: Iterable[str]) -> None:
        if self._link is not None:  # else nobody would ever clear it
            self._changed.update(principals)

    def _now_s(self) -> float:
        return self._clock().monotonic_s

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


@define(eq=False)
class _Question:
    sender: _Sender
    charged: int
    """The tokens of each ticket ahead."""
    answer: asyncio.Future[Standing | Refusal]
    asked_s: float


class SharedLimiter(RequestLimiter):
    """Asks the ledger at the hub."""

    def __init__(self, door: str, hub: Hub) -> None:
        super().__init__()
        self._link = _Link(hub, door, self._on_frame, self._on_lost)
        self._link.on_open = self._opened
        self._questions: dict[int, _Question] = {}
        self._unsettled: deque[tuple[int, int | None]] = deque(maxlen=_MAX_UNSETTLED)
        """Requests that ended while the ledger could not be reached."""

    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> tuple[int, Standing | Refusal]:
        connection = self._link.connection
        if connection is None:
            raise _unreachable()
        sender, wanted = self._asking(principal, limits, tokens, now_s)
        ticket, each = self._next, sender.each
        self._next += 1 + wanted
        question = _Question(sender, each, asyncio.get_running_loop().create_future(), now_s)
        self._questions[ticket] = question
        packed = pack_limits(limits)
        connection.send([SERVICE, "admit", ticket, principal, packed, tokens, wanted, each])
        try:
            answer = await question.answer
        except BaseException:
            self._ended.append((ticket, None))
            self._report()
            raise
        finally:
            del self._questions[ticket]
        if isinstance(answer, Standing):
            self._open[ticket] = principal
        return ticket, answer

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._link.run())
                group.create_task(self._end_waiting())
        finally:
            if self._settling is not None:
                self._settling.cancel()

    def _report(self) -> None:
        if not self._ended and not self._unused:
            return
        if self._link.connection is None:
            self._unsettled += self._ended
            self._unsettled += settled_unused(self._unused)
        else:
            self._link.connection.send([SERVICE, "settle", self._ended, self._unused])
        self._ended, self._unused = [], []

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _forget(self, principal: str) -> None:
        sender = self._senders.get(principal)
        super()._forget(principal)
        if self._link.connection is not None and (sender is None or sender.had_ahead):
            self._link.connection.send([SERVICE, "returned", principal])

    def _opened(self) -> list[int]:
        return [*self._open, *(ticket for ticket, _ in self._unsettled)]

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, int(ticket), standing, limit, retry_after_s, int(given), float(left_s)]:
                answer = unpack_answer(standing, limit, retry_after_s)
                question = self._questions.get(ticket)
                first, end = ticket + 1, ticket + 1 + given
                if question is None or question.answer.done():  # given up, and settled already
                    if given:
                        self._unused.append((first, end))
                    self._report()
                    return
                if isinstance(answer, Standing) and given:
                    sender = question.sender
                    self._give_back(sender)
                    until_s = question.asked_s + left_s
                    sender.got(first, given, question.charged, answer, until_s)
                    sender.had_ahead = True
                question.answer.set_result(answer)
            case [_, "recall", str(principal)]:
                self._forget(principal)
            case [_, "opened", *_]:
                self.ready.set()
                if self._unsettled and self._link.connection is not None:
                    self._link.connection.send([SERVICE, "settle", [*self._unsettled], []])
                    self._unsettled.clear()
            case _:
                raise ValueError("unknown frame")

    def _on_lost(self) -> None:
        for sender in self._senders.values():
            self._give_back(sender)
        self._senders.clear()
        self._report()
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
