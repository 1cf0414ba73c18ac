"""Counts a front door's requests against the limits of their principals.

It asks a ledger: its own if it is alone, otherwise that at the hub.

A front door that is alone decides without asking anybody, and copies what changed in its accounts
to the ledger at the hub twice a second. Several ask that ledger about requests of principals with
limits. In both, a door has an allowance for each principal that is far from its limits: what that
allows is admitted without asking, and reported later, for many requests at once. While the ledger
cannot be reached nothing is admitted, so that limits are never exceeded; requests of principals
without limits are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any
from uuid import uuid4

from attrs import define, field

from commutator.contract.limiter import RequestLimiter, Standing, Ticket
from commutator.contract.principal import Limits, Principal
from commutator.contract.service import Connection, Hub
from commutator.errors import RateLimitError, RegistryError
from commutator.registry.hub import connections
from commutator_limits.ledger import Ledger, Moment, Refusal, Settlement, Use, unstated_tokens
from commutator_limits.service import (
    SERVICE,
    now,
    pack_limits,
    unpack_accounts,
    unpack_allowed,
    unpack_answer,
)

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 2.0
_COPY_INTERVAL_S = 0.5
_REPORT_INTERVAL_S = 0.5
_REPORT_AFTER_S = 5.0
"""What a principal used is reported as late as this, unless it is half of what it is allowed: it
counts as used all the time, and most principals send few requests."""
_FEWEST = 8
"""An allowance is for a few requests more than are expected, so that more is rarely asked for."""
_IDLE_S = 60.0
"""After so long without a request of a principal its allowance is returned."""
_MOST_SENDERS = 8192
"""Of more principals at the same time, some ask each time that they come again."""
_FORGOTTEN_AT_ONCE = 500
"""Senders, so that the event loop is not held up when thousands fall silent together."""
_LESS = 0.75
"""How much of the most that a principal used is remembered from one report to the next."""
_REFUSED_FOR_S = 1.0
"""For this long a principal without requests left is refused unread: a flood costs no parsing."""
_MAX_REFUSED = 10_000
_ALL = 1 << 60
"""Tokens: as many as a ticket was charged."""
_TOO_MANY_AT_ONCE = Refusal("concurrent_requests", _REFUSED_FOR_S, Standing())
_UNITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "concurrent_requests": "requests at the same time",
}


@define(eq=False)
class _Batch:
    """Requests that stand in the ledger as one ticket."""

    sender: _Sender
    standing: Standing
    """How far the principal is from its limits once all that the door is allowed is used."""
    number: int = 0
    """The ticket's number; 0 until the ledger knows the ticket."""
    requests: int = 0
    tokens: int = 0
    """That they were charged together."""
    ended: Settlement = field(factory=lambda: Settlement(0, 0))
    """What is to be reported to the ledger."""

    def reported(self) -> Settlement:
        """What the ledger is told, once."""
        ended, self.ended = self.ended, Settlement(0, 0)
        ended.ticket = self.number
        self.requests -= ended.count
        return ended


@define(eq=False)
class LedgerTicket(Ticket):
    """A request that was admitted and charged."""

    batch: _Batch
    charged: int
    """Tokens."""

    @property
    def standing(self) -> Standing:
        return self.batch.standing


@define(eq=False)
class _Sender:
    """A principal that sends requests, and what this door may admit of it without asking."""

    principal: str
    limits: Limits
    reported_s: float
    """When what it used was reported last; before the first report, when it came."""
    active_s: float = 0.0
    """Since when it sends requests that are not reported; 0: since less than a report interval."""
    requests: int = 0
    """That may be admitted; so are the tokens."""
    tokens: int = 0
    batch: _Batch = field(init=False)
    """Requests that were so admitted and that the ledger was not told of."""
    lately: int = 0
    """Requests since the last report, without those of the batch."""
    most: float = 0.0
    """The most requests in a report interval lately."""
    most_tokens: int = 0
    """The most tokens of one request lately."""
    enough: int = 0
    """If more requests than this may be admitted, no more are asked for; so with the tokens."""
    enough_tokens: int = 0
    has_allowance: bool = False
    """Whether there is something to return, be that nothing by now. If so, the ledger has it
    returned, and what was used and ended reported, before it refuses a request."""
    is_asking: bool = False
    """Whether the ledger is being asked for more."""

    def __attrs_post_init__(self) -> None:
        self.batch = _Batch(self, Standing())

    def is_due(self, now_s: float) -> bool:
        """Whether to report what it used, and to ask for more."""
        return (
            self.requests <= self.enough
            or self.tokens <= self.enough_tokens
            or now_s - self.active_s >= _REPORT_AFTER_S
        )

    def wanted(self, now_s: float) -> tuple[int, int]:
        """How many more requests, and tokens for them, to ask for.

        Half of them are enough until the next report, also when it is late by one: of principals
        whose requests come at random, one in several hundred needs more.
        """
        active_s = now_s - self.active_s if self.active_s else _REPORT_INTERVAL_S
        sent = (self.lately + self.batch.requests) * _REPORT_INTERVAL_S / active_s
        self.most = max(self.most, sent)
        self.enough = _FEWEST // 2 + math.ceil(self.most + 3 * math.sqrt(self.most))
        self.enough_tokens = self.enough * self.most_tokens
        if self.requests > self.enough and self.tokens > self.enough_tokens:
            return 0, 0
        more_tokens = 2 * self.enough_tokens - self.tokens
        return max(0, 2 * self.enough - self.requests), max(0, more_tokens)

    def turn(self, now_s: float) -> None:
        """What it used was reported."""
        self.reported_s, self.active_s, self.lately = now_s, 0.0, 0
        self.most *= _LESS
        self.most_tokens = math.ceil(_LESS * self.most_tokens)


_Wanted = tuple[_Sender, int, int]
"""Who asks for so many more requests and tokens."""


class CountingLimiter(RequestLimiter):
    """What both limiters have in common: what is in hand, and allowances."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """``now_s``: by a clock that never goes back."""
        super().__init__()
        self._now_s = now_s
        self._in_hand: dict[str, int] = {}
        """Requests that count of each principal, admitted or not yet: also those in the queue."""
        self._refused: dict[str, tuple[float, Refusal]] = {}
        """(until when, why) of principals that have no requests left in this minute."""
        self._next = 1
        """The number of the next ticket, or question."""
        self._senders: dict[str, _Sender] = {}
        """By principal; the one whose requests came longest ago first, as of the last report."""
        self._active: set[_Sender] = set()
        """Those that sent requests since they were reported on."""
        self._batches: dict[int, _Batch] = {}
        """By number, those of which requests run."""
        self._used: list[Use] = []
        """What is to be reported."""
        self._ended: set[_Batch] = set()
        """Batches with a number of which requests ended, which is to be reported, too."""
        self._reporting: asyncio.TimerHandle | None = None

    def begin(self, principal: Principal) -> bool:
        limits, name = principal.limits, principal.name
        most = limits.concurrent_requests
        if most is None and not limits.are_counted:
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
    ) -> LedgerTicket:
        name, limits = principal.name, principal.limits
        if max_tokens is None:
            tokens = unstated_tokens(limits, prompt_tokens, answers)
        else:
            tokens = prompt_tokens + answers * max_tokens
        sender = self._senders.get(name)
        if (
            sender is not None
            and sender.requests
            and tokens <= sender.tokens
            and (sender.limits is limits or sender.limits == limits)
        ):
            sender.requests -= 1
            sender.tokens -= tokens
            sender.most_tokens = max(sender.most_tokens, tokens)
            self._active.add(sender)
            batch = sender.batch
            batch.requests += 1
            batch.tokens += tokens
            return LedgerTicket(batch, tokens)
        answer = await self._ask(name, limits, tokens)
        if isinstance(answer, Refusal):
            self._remember(name, answer)
            raise _rate_limit_error(principal, answer, tokens)
        return answer

    @abstractmethod
    async def _ask(self, principal: str, limits: Limits, tokens: int) -> LedgerTicket | Refusal:
        """Ask the ledger; as ``admit``."""

    def _remember(self, principal: str, refusal: Refusal) -> None:
        """Remember a refusal that also later requests would meet."""
        if refusal.limit == "requests_per_minute" and refusal.retry_after_s is not None:
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            until_s = self._now_s() + min(_REFUSED_FOR_S, refusal.retry_after_s)
            self._refused[principal] = (until_s, refusal)

    def end(self, principal: Principal, ticket: Ticket | None, tokens: int | None) -> None:
        name = principal.name
        if left := self._in_hand[name] - 1:
            self._in_hand[name] = left
        else:
            del self._in_hand[name]
        if ticket is None:
            return
        assert isinstance(ticket, LedgerTicket)
        batch = ticket.batch
        ended = batch.ended
        ended.count += 1
        if tokens is None:
            ended.unreached += 1
            ended.below += ticket.charged
        elif tokens < ticket.charged:
            ended.below += ticket.charged - tokens
        else:
            ended.beyond += tokens - ticket.charged
        if batch.number:
            self._ended.add(batch)
            if not batch.sender.has_allowance:
                self._report()  # the principal may be near its limits

    def _close(self, sender: _Sender) -> None:
        """What was used up to now becomes a ticket."""
        batch = sender.batch
        if not batch.requests:
            return
        sender.lately += batch.requests
        sender.batch = _Batch(sender, batch.standing)
        self._used.append(Use(sender.principal, batch.requests, batch.tokens, batch.ended))
        if batch.requests > batch.ended.count:
            batch.number = self._new_number()
            self._batches[batch.number] = batch
            batch.reported()

    def _report(self, asking: Sequence[_Wanted] = ()) -> None:
        """Report the tickets that were made, and what ended of all tickets."""
        if not (self._used or self._ended or asking) or not self._can_report():
            return
        used, ended, self._used, self._ended = self._used, self._ended, [], set()
        self._tell(used, [batch.reported() for batch in ended], asking)
        for batch in ended:
            if not batch.requests:
                self._batches.pop(batch.number, None)

    def _can_report(self) -> bool:
        """Whether the ledger can be reached; what ended is kept until then."""
        return True

    @abstractmethod
    def _tell(self, used: list[Use], ended: list[Settlement], asking: Sequence[_Wanted]) -> None:
        """Tell the ledger, and ask it for what those ``asking`` want."""

    @abstractmethod
    def _return(self, principal: str) -> None:
        """Tell the ledger that no more is admitted of what was allowed."""

    def _asking(
        self, principal: str, limits: Limits, tokens: int
    ) -> tuple[_Batch, tuple[int, int]]:
        """What the ledger is asked for: a ticket for the request, and more of both for others."""
        sender = self._senders.get(principal)
        if sender is not None and sender.limits != limits:
            self._forget(sender)
            sender = None
        if sender is None:
            sender = self._senders[principal] = _Sender(principal, limits, self._now_s())
        sender.lately += 1
        sender.most_tokens = max(sender.most_tokens, tokens)
        self._active.add(sender)
        self._report_later()
        more = (0, 0) if sender.is_asking else sender.wanted(self._now_s())
        number = self._new_number()
        batch = _Batch(sender, Standing(), number, 1, tokens)
        self._batches[number] = batch
        return batch, more

    def _new_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def _allowed(self, sender: _Sender, standing: Standing, requests: int, tokens: int) -> None:
        """The ledger allowed so much more; ``standing`` is what remains beside it."""
        sender.requests += requests
        sender.tokens += tokens
        sender.batch.standing = standing
        sender.has_allowance = sender.has_allowance or requests > 0 or tokens > 0

    def _report_later(self) -> None:
        """Keep reporting while there are senders."""
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            self._reporting = loop.call_later(_REPORT_INTERVAL_S, self._report_and_ask)

    def _report_and_ask(self) -> None:
        self._reporting = None
        try:
            self._report_due()
        finally:
            if self._senders:
                self._report_later()

    def _report_due(self) -> None:
        """Report, ask for what will be used next, and return what is not used."""
        senders, now_s = self._senders, self._now_s()
        due, asking = self._due(now_s), []
        for sender in due:
            self._close(sender)
            if sender.has_allowance and not sender.is_asking:
                more, more_tokens = sender.wanted(now_s)
                if more or more_tokens:
                    asking.append((sender, more, more_tokens))
        self._report(asking)
        for sender in due:
            sender.turn(now_s)
            senders[sender.principal] = senders.pop(sender.principal)  # to the end
        self._active.difference_update(due)
        for oldest in [*islice(senders.values(), _FORGOTTEN_AT_ONCE)]:
            if now_s - oldest.reported_s < _IDLE_S and len(senders) <= _MOST_SENDERS:
                break
            self._forget(oldest)

    def _due(self, now_s: float) -> list[_Sender]:
        due = []
        for sender in self._active:
            if not sender.active_s:
                sender.active_s = now_s - _REPORT_INTERVAL_S
            if sender.is_due(now_s):
                due.append(sender)
        return due

    def _forget(self, sender: _Sender) -> None:
        """Report what it used, and return the rest."""
        del self._senders[sender.principal]
        self._active.discard(sender)
        self._close(sender)
        sender.requests = sender.tokens = 0
        sender.has_allowance = False
        self._report()
        self._return(sender.principal)


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


class LocalLimiter(CountingLimiter):
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
        self._ledger.door_opened(door, "", clock())
        self._changed: set[str] = set()
        """Principals whose accounts differ from the copy."""
        self._copied = False
        """Whether this connection's copy has all accounts."""
        self._link: _Link | None = None
        if hub is None:
            self.ready.set()
        else:
            self._link = _Link(hub, door, list, self._on_frame, self._on_lost)

    async def _ask(self, principal: str, limits: Limits, tokens: int) -> LedgerTicket | Refusal:
        batch, more = self._asking(principal, limits, tokens)
        sender, ledger, door, at = batch.sender, self._ledger, self._door, self._clock()
        answer = ledger.admit(door, batch.number, principal, limits, tokens, at)
        if isinstance(answer, Refusal) and sender.has_allowance:
            self._forget(sender)
            answer = ledger.admit(door, batch.number, principal, limits, tokens, at)
        self._differ([principal])
        if isinstance(answer, Refusal):
            del self._batches[batch.number]
            return answer
        if any(more) and self._senders.get(principal) is sender:
            allowed = ledger.allow(door, principal, limits, *more, at)
            answer = ledger.standing(principal, limits, at)
            self._allowed(sender, answer, *allowed)
        batch.standing = answer
        return LedgerTicket(batch, tokens)

    def _tell(self, used: list[Use], ended: list[Settlement], asking: Sequence[_Wanted]) -> None:
        ledger, door, at = self._ledger, self._door, self._clock()
        for one in used:
            ledger.used(door, one, at)
        self._differ(one.principal for one in used)
        self._differ(ledger.settle(door, ended, at))
        for sender, requests, tokens in asking:
            principal, limits = sender.principal, sender.limits
            allowed = ledger.allow(door, principal, limits, requests, tokens, at)
            self._allowed(sender, ledger.standing(principal, limits, at), *allowed)
        self._differ(sender.principal for sender, _, _ in asking)

    def _return(self, principal: str) -> None:
        self._ledger.returned(self._door, principal)
        self._differ([principal])

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
            link.connection.send([SERVICE, "changes", day, accounts])
            self._copied = True
            self._changed.clear()


@define(eq=False)
class _Question:
    sender: _Sender
    asked_s: float
    asks_more: bool
    """Whether an allowance is asked for."""
    answer: asyncio.Future[Standing | Refusal] | None = None
    """For the request that waits; None: no request does."""


class SharedLimiter(CountingLimiter):
    """Asks the ledger at the hub."""

    def __init__(self, door: str, hub: Hub) -> None:
        """Made in the event loop that uses it."""
        super().__init__(asyncio.get_running_loop().time)
        self._link = _Link(hub, door, self._tickets_left, self._on_frame, self._on_lost)
        self._questions: dict[int, _Question] = {}

    async def _ask(self, principal: str, limits: Limits, tokens: int) -> LedgerTicket | Refusal:
        connection = self._link.connection
        if connection is None:
            raise _unreachable()
        batch, more = self._asking(principal, limits, tokens)
        number, sender = batch.number, batch.sender
        future: asyncio.Future[Standing | Refusal] = asyncio.get_running_loop().create_future()
        question = self._questions[number] = _Question(sender, self._now_s(), any(more), future)
        sender.is_asking = sender.is_asking or question.asks_more
        packed = pack_limits(limits)
        connection.send([SERVICE, "admit", number, principal, packed, tokens, *more])
        try:
            answer = await future
        except BaseException:
            self._answered_for(question)
            batch.ended = Settlement(number, 1, unreached=1, below=_ALL)
            self._ended.add(batch)
            self._report()
            raise
        finally:
            del self._questions[number]
        if isinstance(answer, Refusal):
            del self._batches[number]
            return answer
        batch.standing = answer
        return LedgerTicket(batch, tokens)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._link.run())
                group.create_task(self._end_waiting())
        finally:
            if self._reporting is not None:
                self._reporting.cancel()

    def _can_report(self) -> bool:
        return self._link.connection is not None

    def _tell(self, used: list[Use], ended: list[Settlement], asking: Sequence[_Wanted]) -> None:
        assert self._link.connection is not None
        asked, now_s = [], self._now_s()
        for sender, *more in asking:
            number = self._new_number()
            self._questions[number] = _Question(sender, now_s, asks_more=True)
            sender.is_asking = True
            limits = pack_limits(sender.limits)
            asked.append((number, sender.principal, limits, *more))
        self._link.connection.send([SERVICE, "report", used, ended, asked])

    def _return(self, principal: str) -> None:
        if self._link.connection is not None:
            self._link.connection.send([SERVICE, "returned", principal])

    def _tickets_left(self) -> list[tuple[int, int, str]]:
        return [
            (number, batch.requests, batch.sender.principal)
            for number, batch in self._batches.items()
        ]

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, int(number), standing, limit, retry_after_s, int(requests), int(tokens)]:
                answer = unpack_answer(standing, limit, retry_after_s)
                self._answered(number, answer, requests, tokens)
            case [_, "allowed", list(answers)]:
                for number, standing, requests, tokens in unpack_allowed(answers):
                    if (question := self._questions.pop(number, None)) is not None:
                        self._answered_for(question)
                        self._take(question, standing, requests, tokens)
            case [_, "recall", str(principal)]:
                if (sender := self._senders.get(principal)) is not None:
                    self._forget(sender)
                else:
                    self._return(principal)
            case [_, "opened", *_]:
                self.ready.set()
                self._report()
            case _:
                raise ValueError("unknown frame")

    def _answered(
        self, number: int, answer: Standing | Refusal, requests: int, tokens: int
    ) -> None:
        question = self._questions.get(number)
        if question is None or question.answer is None or question.answer.done():
            if isinstance(answer, Standing) and self._link.connection is not None:
                # The request has left. If the ledger was told before it admitted it, it passed
                # that over.
                self._tell([], [Settlement(number, 1, unreached=1, below=_ALL)], ())
            return
        self._answered_for(question)
        if isinstance(answer, Standing):
            self._take(question, answer, requests, tokens)
        question.answer.set_result(answer)

    def _answered_for(self, question: _Question) -> None:
        if question.asks_more:
            question.sender.is_asking = False

    def _take(self, question: _Question, standing: Standing, requests: int, tokens: int) -> None:
        """What was allowed to one who was forgotten was returned."""
        sender = question.sender
        if self._senders.get(sender.principal) is sender:
            self._allowed(sender, standing, requests, tokens)

    def _on_lost(self) -> None:
        """The ledger charges all that the door was allowed."""
        for sender in self._senders.values():
            self._close(sender)
            sender.has_allowance = False
        self._senders.clear()
        self._active.clear()
        self._used.clear()
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
                self._answered_for(question)
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
        tickets: Callable[[], list[tuple[int, int, str]]],
        on_frame: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        """``tickets`` returns their numbers, how many requests of each are left, and whose."""
        self.connection: Connection | None = None
        """None while the ledger cannot be reached."""
        self._hub = hub
        self._door = door
        self._incarnation = uuid4().hex
        self._tickets = tickets
        self._on_frame = on_frame
        self._on_lost = on_lost

    async def run(self) -> None:
        found = connections(self._hub.connect, self._take, "limits")
        async with aclosing(found):
            async for connection, lost in found:
                connection.send([SERVICE, "open", self._door, self._incarnation, self._tickets()])
                self.connection = connection
                try:
                    await lost.wait()
                finally:
                    self.connection = None
                    self._on_lost()
                log.warning("limits: the connection to the hub was lost; reconnecting")

    def _take(self, frame: list[Any]) -> None:
        try:
            self._on_frame(frame)
        except (TypeError, ValueError) as error:
            log.warning("limits: the ledger sent a wrong frame: %.200s", error)
