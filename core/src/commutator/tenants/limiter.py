"""Counts a front door's requests against the limits of their principals.

It asks a ledger: its own if it is alone, otherwise that at the hub.

A front door that is alone decides without asking anybody, and copies what changed in its accounts
to the ledger at the hub twice a second. Of several, each asks that ledger for the requests
of principals with limits. In both, those of a principal that sends many and is far from its limits
are admitted some at a time, ahead. While the ledger cannot be reached none of them are admitted, so
that limits are never exceeded; requests of other principals are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from attrs import define, field

from commutator.backoff import Backoff
from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError, RegistryError
from commutator.frames import FrameProtocol
from commutator.registry.hub import Hub
from commutator.tenants.ledger import (
    Ledger,
    Moment,
    Refusal,
    Settlement,
    Standing,
    unstated_tokens,
)
from commutator.tenants.service import (
    SERVICE,
    left_of_second_s,
    now,
    pack_account,
    pack_limits,
    pack_settlement,
    unpack_accounts,
    unpack_answer,
)

__all__ = [
    "LocalLimiter",
    "RequestLimiter",
    "SharedLimiter",
    "Ticket",
]

log = logging.getLogger(__name__)

_RECONNECT = Backoff(first_s=0.05, longest_s=2.0)
_ANSWER_TIMEOUT_S = 2.0
_COPY_INTERVAL_S = 0.5
_COUNTED_S = 1.0
"""The requests of this time say how many tickets are asked for ahead."""
_SHORTEST_COUNTED_S = 0.05
"""Requests that come in less time say no more than that they did in this."""
_FEWEST_AHEAD = 2
_REPORT_INTERVAL_S = 0.5
"""Requests that end are reported together, unless their principal is not admitted ahead."""
_MOST_AHEAD = 256
_REFUSED_FOR_S = 1.0
"""For this long a principal without requests left is refused unread: a flood costs no parsing."""
_MAX_REFUSED = 10_000
_TOO_MANY_AT_ONCE = Refusal("concurrent_requests", _REFUSED_FOR_S, Standing())
_UNITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "concurrent_requests": "requests at the same time",
}
_RENEW_AFTER_S = 0.005
"""After the ledger's second ended by this door's estimate, which is early by the way of a frame."""


@define(eq=False)
class Ticket:
    """A request that was admitted and charged, or several that were admitted together, ahead."""

    number: int
    charged: int
    """Tokens of each request."""
    sender: _Sender | None = None
    """Whose requests they are; None: nobody's who sends any now."""
    ahead: int = 0
    """Requests that were admitted ahead; 0: the ticket is for one that has come."""
    standing: Standing = field(factory=Standing)
    """How far the principal is from its limits once all requests of the ticket are charged."""
    unused: int = field(init=False)
    """Requests that may still come."""
    left: int = field(init=False)
    """Requests that the ledger was not told of that they ended."""
    ended: Settlement = field(init=False)
    """What is to be reported to the ledger."""

    def __attrs_post_init__(self) -> None:
        self.unused, self.left = self.ahead, self.ahead or 1
        self.ended = Settlement(self.number, 0)

    @property
    def taken(self) -> int:
        """Requests that came of those that were admitted ahead."""
        return self.ahead - self.unused

    def give_back(self) -> None:
        """No more requests come."""
        self.ended.count += self.unused
        self.ended.unreached += self.unused
        self.unused = 0

    def reported(self) -> Settlement:
        """What the ledger is told, once."""
        ended, self.ended = self.ended, Settlement(self.number, 0)
        self.left -= ended.count
        return ended


_NOTHING_AHEAD = Ticket(0, 0)


@define(eq=False)
class _Sender:
    """What this front door knows of one principal that sends requests."""

    limits: Limits
    since_s: float
    """Its requests are counted from then on, and anew after ``_COUNTED_S``."""
    requests: int = 0
    """Since then, as far as ``count`` counted them."""
    before_per_s: float = 0.0
    """In the time before that."""
    until_s: float = 0.0
    """Until when the ticket can be used: the end of a second of the ledger's clock."""
    ticket: Ticket = _NOTHING_AHEAD
    """For requests that were admitted ahead. Some may be left even if it is too late for them."""
    taken: int = 0
    """Those of the ticket that are counted."""
    most_tokens: int = 0
    """Of one request since ``since_s``."""
    most_before: int = 0
    """In the time before that."""
    had_ahead: bool = False
    """Whether the ledger ever admitted requests ahead, until the sender is forgotten. If so, it has
    them and what ended reported before it refuses a request of the principal."""
    is_asking: bool = False
    """Whether the ledger is being asked for requests ahead."""

    def count(self, now_s: float, asking: int = 0) -> None:
        """Count the requests that took the ticket since the last call, and those ``asking``."""
        taken = self.ticket.taken
        came, self.taken = taken - self.taken, taken
        self.requests += came
        counted_s = now_s - self.since_s
        if counted_s >= _COUNTED_S and (came or asking):
            self.before_per_s, self.most_before = self.requests / counted_s, self.most_tokens
            self.since_s, self.requests, self.most_tokens = now_s, 0, 0
        self.requests += asking

    def wanted(self, now_s: float) -> int:
        """How many requests to ask for ahead: enough for those until the ticket lapses.

        Of principals whose requests come at random, one in several hundred needs more. What comes
        in a burst is asked for before the burst has lasted as long as requests are counted.
        """
        left_s = (self.until_s - now_s) % 1.0
        since_first_s = max(now_s - self.since_s, _SHORTEST_COUNTED_S)
        per_s = max((self.requests - 1) / since_first_s, self.before_per_s)
        expected = per_s * left_s
        if expected < _FEWEST_AHEAD:
            return 0
        return min(int(expected + 3 * math.sqrt(expected)), _MOST_AHEAD)

    @property
    def each(self) -> int:
        """The tokens to ask for with each of them: few requests are larger."""
        most = max(self.most_tokens, self.most_before)
        return most + most // 8


class RequestLimiter(ABC):
    """Counts the requests of one front door: each begins, is admitted, and ends.

    Those of a principal that sends many and is far from its limits are admitted some at a time,
    ahead: then a request takes a ticket, and its end is reported with those of others.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """``now_s``: by a clock that never goes back."""
        self.ready = asyncio.Event()
        """Set once requests can be counted, together with what counts from before."""
        self._now_s = now_s
        self._in_hand: dict[str, int] = {}
        """Requests that count of each principal, admitted or not yet: also those in the queue."""
        self._refused: dict[str, tuple[float, Refusal]] = {}
        """(until when, why) of principals that have no requests left in this minute."""
        self._next = 1
        """The number of the next ticket."""
        self._senders: dict[str, _Sender] = {}
        """The principals that sent requests lately."""
        self._tickets: dict[int, Ticket] = {}
        """Those of which the ledger may have some left."""
        self._ended: set[Ticket] = set()
        """Those of which requests ended that are to be reported soon."""
        self._reporting: asyncio.TimerHandle | None = None

    def begin(self, principal: Principal) -> bool:
        """A request begins. Whether it counts: its end must be said then, however it ends.

        Raises RateLimitError where it is certain already that the request is refused.
        """
        limits, name = principal.limits, principal.name
        most = limits.concurrent_requests
        if most is None and not _counts_tokens_or_requests(limits):
            return False
        if self._refused and (known := self._refused.get(name)) is not None:
            until_s, refusal = known
            if self._now_s() < until_s:
                raise _rate_limit_error(principal, refusal)
            del self._refused[name]
        in_hand = self._in_hand.get(name, 0)
        if most is not None and in_hand >= most:
            raise _rate_limit_error(principal, _TOO_MANY_AT_ONCE)
        self._in_hand[name] = in_hand + 1
        return True

    async def admit(
        self,
        principal: Principal,
        prompt_tokens: int,
        answers: int = 1,
        max_tokens: int | None = None,
    ) -> Ticket:
        """Charge a request that began, once, if it is within the limits.

        ``max_tokens`` is the longest answer as the client stated it, None if it did not. Raises
        RateLimitError, or RegistryError when the ledger cannot be asked. A request whose asking is
        cancelled is not charged.
        """
        name, limits = principal.name, principal.limits
        if max_tokens is None:
            tokens = unstated_tokens(limits, prompt_tokens, answers)
        else:
            tokens = prompt_tokens + answers * max_tokens
        # Most requests are charged ahead, and wait for nothing.
        now_s, sender = self._now_s(), self._senders.get(name)
        if (
            sender is not None
            and (ticket := sender.ticket).unused
            and tokens <= ticket.charged
            and now_s < sender.until_s
            and (sender.limits is limits or sender.limits == limits)
        ):
            ticket.unused -= 1
            sender.most_tokens = max(sender.most_tokens, tokens)
            return ticket
        answer = await self._ask(name, limits, tokens, now_s)
        if isinstance(answer, Refusal):
            self._remember(name, answer)
            raise _rate_limit_error(principal, answer, tokens)
        return answer

    @abstractmethod
    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> Ticket | Refusal:
        """Ask the ledger; as ``admit``."""

    def _remember(self, principal: str, refusal: Refusal) -> None:
        """Remember a refusal that also later requests would meet."""
        if refusal.limit == "requests_per_minute" and refusal.retry_after_s is not None:
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            until_s = self._now_s() + min(_REFUSED_FOR_S, refusal.retry_after_s)
            self._refused[principal] = (until_s, refusal)

    def end(self, principal: Principal, ticket: Ticket | None, tokens: int | None) -> None:
        """A request that counts ended after ``tokens``.

        ``ticket`` is None if it was not admitted, ``tokens`` if it reached no worker: both cost
        nothing.
        """
        name = principal.name
        if left := self._in_hand[name] - 1:
            self._in_hand[name] = left
        else:
            del self._in_hand[name]
        if ticket is None:
            return
        ended = ticket.ended
        ended.count += 1
        if tokens is None:
            ended.unreached += 1
        elif tokens < ticket.charged:
            ended.below += ticket.charged - tokens
        else:
            ended.beyond += tokens - ticket.charged
        self._ended.add(ticket)
        if ticket.sender is None or not ticket.sender.had_ahead:
            self._report()  # the principal may be near its limits

    def _report(self) -> None:
        """Have the ledger settle what ended and what was not used."""
        if self._ended and self._can_report():
            settlements = []
            for ticket in self._ended:
                settlements.append(ticket.reported())
                if not ticket.left:
                    self._tickets.pop(ticket.number, None)
            self._ended.clear()
            self._settle(settlements)

    def _can_report(self) -> bool:
        """Whether the ledger can be reached; what ended is kept until then."""
        return True

    @abstractmethod
    def _settle(self, settlements: list[Settlement]) -> None:
        """Tell the ledger."""

    @abstractmethod
    async def run(self) -> None:
        """Stay in touch with the supervisor's ledger until cancelled."""

    def _asking(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> tuple[_Sender, Ticket, int]:
        """What the ledger is asked for: a ticket for the request, and how many more ahead."""
        sender = self._senders.get(principal)
        if sender is None:
            sender = self._senders[principal] = _Sender(limits, now_s)
        sender.count(now_s, asking=1)
        sender.most_tokens = max(sender.most_tokens, tokens)
        self._report_later()
        if sender.limits == limits and (
            sender.is_asking or (sender.ticket.unused and now_s < sender.until_s)
        ):
            wanted = 0  # they come soon, or this request alone is too large for them
        else:
            self._give_back(sender)
            sender.limits = limits
            wanted = sender.wanted(now_s)
        number = self._new_number()
        ticket = self._tickets[number] = Ticket(number, tokens, sender)
        return sender, ticket, wanted

    def _new_number(self) -> int:
        """The number of a ticket; the one after it is for those that are admitted ahead."""
        number, self._next = self._next, self._next + 2
        return number

    def _got_ahead(
        self, sender: _Sender, ticket: Ticket, standing: Standing, until_s: float
    ) -> None:
        """The ledger admitted the requests of ``ticket`` ahead; ``standing`` is without them."""
        ticket.standing = standing.after(ticket.ahead, ticket.ahead * ticket.charged)
        self._tickets[ticket.number] = ticket
        self._give_back(sender)
        sender.ticket, sender.until_s, sender.had_ahead = ticket, until_s, True

    def _give_back(self, sender: _Sender) -> None:
        """Settle what ``sender`` does not use."""
        sender.count(self._now_s())
        if sender.ticket.unused:
            sender.ticket.give_back()
            self._ended.add(sender.ticket)
        sender.ticket, sender.taken = _NOTHING_AHEAD, 0

    def _report_later(self) -> None:
        """Keep reporting while there are senders."""
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            self._reporting = loop.call_later(_REPORT_INTERVAL_S, self._report_some)

    def _report_some(self) -> None:
        """Give back what was not used in time, and report what ended."""
        now_s = self._now_s()
        for principal, sender in [*self._senders.items()]:
            if now_s >= sender.until_s:
                self._give_back(sender)
            else:
                sender.count(now_s)
            if now_s - sender.since_s >= 2 * _COUNTED_S:
                self._forget(principal)
        self._report()
        self._reporting = None
        if self._senders:
            self._report_later()

    def _forget(self, principal: str) -> None:
        """Give back what the principal does not use."""
        if (sender := self._senders.pop(principal, None)) is not None:
            self._give_back(sender)
            sender.had_ahead = False
        self._report()


def _rate_limit_error(
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
    return RateLimitError(text, refusal.limit, refusal.retry_after_s, refusal.standing)


def _counts_tokens_or_requests(limits: Limits) -> bool:
    return (
        limits.requests_per_minute is not None
        or limits.tokens_per_minute is not None
        or limits.tokens_per_day is not None
    )


class LocalLimiter(RequestLimiter):
    """The ledger of a front door that is alone.

    With a ``hub``, ``run`` keeps a copy there.
    """

    def __init__(
        self, door: str, hub: Hub | None = None, clock: Callable[[], Moment] = now
    ) -> None:
        # Without a Moment for each request, of which only one clock is needed.
        super().__init__(time.monotonic if clock is now else lambda: clock().monotonic_s)
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
            self._link = _Link(hub, door, list, self._on_frame, self._on_lost)

    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> Ticket | Refusal:
        sender, ticket, wanted = self._asking(principal, limits, tokens, now_s)
        ledger, door, at, number = self._ledger, self._door, self._clock(), ticket.number
        answer = ledger.admit(door, number, principal, limits, tokens, at)
        if isinstance(answer, Refusal) and (sender.ticket.unused or self._ended):
            self._give_back(sender)
            self._report()
            answer = ledger.admit(door, number, principal, limits, tokens, at)
        self._differ([principal])
        if isinstance(answer, Refusal):
            del self._tickets[number]
            return answer
        ticket.standing = answer
        if wanted:
            each = sender.each
            given = ledger.admit_ahead(door, number + 1, wanted, principal, limits, each, at)
            if given:
                ahead = Ticket(number + 1, each, sender, given)
                self._got_ahead(sender, ahead, answer, now_s + left_of_second_s(at))
        return ticket

    def _settle(self, settlements: list[Settlement]) -> None:
        self._differ(self._ledger.settle(self._door, settlements, self._clock()))

    def _differ(self, principals: Iterable[str]) -> None:
        if self._link is not None:  # else nobody would ever clear it
            self._changed.update(principals)

    async def run(self) -> None:
        if self._link is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run())
            group.create_task(self._copy(self._link))

    def _on_lost(self) -> None:
        self._copied = False

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
    principal: str
    sender: _Sender
    each: int
    """The tokens of each request ahead."""
    asked_s: float
    answer: asyncio.Future[Standing | Refusal] | None
    """For the request that waits; None: no request does."""


class SharedLimiter(RequestLimiter):
    """Asks the ledger at the hub."""

    def __init__(self, door: str, hub: Hub) -> None:
        """Made in the event loop that uses it."""
        super().__init__(asyncio.get_running_loop().time)
        self._link = _Link(hub, door, self._tickets_left, self._on_frame, self._on_lost)
        self._questions: dict[int, _Question] = {}
        self._renewing: asyncio.TimerHandle | None = None

    async def _ask(
        self, principal: str, limits: Limits, tokens: int, now_s: float
    ) -> Ticket | Refusal:
        connection = self._link.connection
        if connection is None:
            raise _unreachable()
        sender, ticket, wanted = self._asking(principal, limits, tokens, now_s)
        number, each = ticket.number, sender.each
        future: asyncio.Future[Standing | Refusal] = asyncio.get_running_loop().create_future()
        self._questions[number] = _Question(principal, sender, each, now_s, future)
        packed = pack_limits(limits)
        connection.send([SERVICE, "admit", number, principal, packed, tokens, wanted, each])
        try:
            answer = await future
        except BaseException:
            ticket.ended = Settlement(number, 1, unreached=1)
            self._ended.add(ticket)
            self._report()
            raise
        finally:
            del self._questions[number]
        if isinstance(answer, Refusal):
            del self._tickets[number]
            return answer
        ticket.standing = answer
        return ticket

    def _renew_at(self, when_s: float) -> None:
        """Ask for all principals together, as the ledger's next second begins."""
        if self._renewing is None:
            loop = asyncio.get_running_loop()
            self._renewing = loop.call_at(when_s + _RENEW_AFTER_S, self._renew)

    def _renew(self) -> None:
        self._renewing = None
        connection, now_s = self._link.connection, self._now_s()
        if connection is None:
            return
        for principal, sender in self._senders.items():
            if not sender.had_ahead or sender.is_asking or now_s < sender.until_s:
                continue
            self._give_back(sender)
            if wanted := sender.wanted(now_s):
                sender.is_asking = True
                number = self._new_number()
                self._questions[number] = _Question(principal, sender, sender.each, now_s, None)
                packed = pack_limits(sender.limits)
                connection.send([SERVICE, "ahead", number, principal, packed, wanted, sender.each])
        self._report()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._link.run())
                group.create_task(self._end_waiting())
        finally:
            for timer in (self._reporting, self._renewing):
                if timer is not None:
                    timer.cancel()

    def _can_report(self) -> bool:
        return self._link.connection is not None

    def _settle(self, settlements: list[Settlement]) -> None:
        assert self._link.connection is not None
        packed = [pack_settlement(one) for one in settlements]
        self._link.connection.send([SERVICE, "settle", packed])

    def _forget(self, principal: str) -> None:
        sender = self._senders.get(principal)
        had_ahead = sender is not None and sender.had_ahead
        super()._forget(principal)
        if had_ahead:
            self._returned(principal)

    def _returned(self, principal: str) -> None:
        if self._link.connection is not None:
            self._link.connection.send([SERVICE, "returned", principal])

    def _tickets_left(self) -> list[tuple[int, int]]:
        return [(ticket.number, ticket.left) for ticket in self._tickets.values()]

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, int(number), standing, limit, retry_after_s, int(given), float(left_s)]:
                answer = unpack_answer(standing, limit, retry_after_s)
                self._answered(number, answer, given, left_s)
            case [_, "recall", str(principal)]:
                super()._forget(principal)
                self._returned(principal)
            case [_, "opened", *_]:
                self.ready.set()
                self._report()
            case _:
                raise ValueError("unknown frame")

    def _answered(self, number: int, answer: Standing | Refusal, given: int, left_s: float) -> None:
        question = self._questions.get(number)
        if question is not None and question.answer is None:
            del self._questions[number]
            question.sender.is_asking = False
        if given > 0:
            if (
                question is not None
                and isinstance(answer, Standing)
                and self._senders.get(question.principal) is question.sender
            ):
                ahead = Ticket(number + 1, question.each, question.sender, given)
                until_s = question.asked_s + left_s
                self._got_ahead(question.sender, ahead, answer, until_s)
                self._renew_at(until_s)
            else:  # nobody waits for them any more
                ahead = Ticket(number + 1, 0, ahead=given)
                ahead.give_back()
                self._ended.add(ahead)
                self._report()
                if question is not None:
                    self._returned(question.principal)
        if question is not None and question.answer is not None and not question.answer.done():
            question.answer.set_result(answer)
        else:
            self._report()

    def _on_lost(self) -> None:
        for sender in self._senders.values():
            self._give_back(sender)
            sender.had_ahead = False
        self._senders.clear()
        self._end_questions(math.inf)

    async def _end_waiting(self) -> None:
        """One timer for all questions costs less than one for each."""
        while True:
            await asyncio.sleep(_ANSWER_TIMEOUT_S / 4)
            self._end_questions(self._now_s() - _ANSWER_TIMEOUT_S)

    def _end_questions(self, before_s: float) -> None:
        """Give those up that were asked before."""
        for number, question in [*self._questions.items()]:
            if question.asked_s >= before_s:
                continue
            if question.answer is None:
                del self._questions[number]
                question.sender.is_asking = False
            elif not question.answer.done():
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
        tickets: Callable[[], list[tuple[int, int]]],
        on_frame: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        """``tickets`` returns their numbers, and how many requests of each are left."""
        self.connection: FrameProtocol | None = None
        """None while the ledger cannot be reached."""
        self._hub = hub
        self._door = door
        self._incarnation = uuid4().hex
        self._tickets = tickets
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
                        [SERVICE, "open", self._door, self._incarnation, self._tickets()]
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
