"""What principals have used, and whether one more request is within their limits. Pure.

A request is charged when it is admitted: one request, its prompts, and as many tokens as its
answers may take. When it ends, the charge becomes what it took: what it did not take is given back
where it was charged, what it took beyond is charged then. A minute is a sliding window of slots of
one second: in any 60 seconds, no more than the limit is charged at admissions. Slots make the
window up to a second longer, never shorter.

A day is one of UTC. Day totals and windows live in the ledger's process, not on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from attrs import define, evolve, field, frozen

from commutator.contract.principal import Limits

__all__ = [
    "DAY_S",
    "UNSTATED_ANSWER_TOKENS",
    "WINDOW_S",
    "Account",
    "Ledger",
    "LimitName",
    "Moment",
    "Refusal",
    "Settlement",
    "SlidingWindow",
    "Standing",
    "unstated_tokens",
]

WINDOW_S = 60
DAY_S = 86_400
UNSTATED_ANSWER_TOKENS = 512
"""What an answer is charged at admission when its request does not state ``max_tokens``."""
_BUSY_RETRY_S = 1.0
"""Nobody knows when a running request ends, so this is when to ask again."""
_CHECKED_FOR_IDLENESS = 2
_AHEAD_SHARE = 16
"""What is admitted ahead is at most one part in this many of what each limit still has room for."""

LimitName = Literal[
    "requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests"
]


@define  # one or two are made for each request, and frozen ones take three times as long to fill
class Moment:
    """One point in time by two clocks."""

    monotonic_s: float
    """For windows; never goes back."""
    unix_s: float
    """For days of UTC."""


@define(eq=False)  # as above; and texts are remembered of each
class Standing:
    """How far a principal is from its limits, right after a request was admitted or refused."""

    limit_requests: int | None = None
    """Requests a minute; None without such a limit, and so for the next two."""
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    """Seconds until all of the limit is free again if no further request comes."""
    limit_tokens: int | None = None
    """Tokens a minute; a day where only a limit for the day is set."""
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None

    def after(self, requests: int, tokens: int) -> Standing:
        """The same with so many more of both charged."""
        left_requests, left_tokens = self.remaining_requests, self.remaining_tokens
        return evolve(
            self,
            remaining_requests=None if left_requests is None else max(0, left_requests - requests),
            remaining_tokens=None if left_tokens is None else max(0, left_tokens - tokens),
        )


@frozen
class Refusal:
    """A request that is beyond a limit."""

    limit: LimitName
    retry_after_s: float | None
    """Seconds until it may fit if nothing else comes; None: it never fits, being too large."""
    standing: Standing


def unstated_tokens(limits: Limits, prompt_tokens: int, answers: int) -> int:
    """What a request is charged at admission whose client did not state ``max_tokens``.

    Its prompts, and ``UNSTATED_ANSWER_TOKENS`` for each answer, but no more than the tightest limit
    leaves beside the prompts: such a request may take more in the end, and is charged the rest
    then.
    """
    guess = prompt_tokens + answers * UNSTATED_ANSWER_TOKENS
    bounds = [limits.tokens_per_minute, limits.tokens_per_day]
    return max(prompt_tokens, min([guess, *(bound for bound in bounds if bound is not None)]))


@frozen
class Account:
    """What one principal has used, for another ledger that continues with it."""

    principal: str
    requests: Sequence[tuple[int, int]]
    """(second of the monotonic clock, requests), ascending, of this minute: all from the first."""
    tokens: Sequence[tuple[int, int]]
    """The same of tokens."""
    day_tokens: int
    """Of this day of UTC."""


@define
class SlidingWindow:
    """What was charged in the last ``WINDOW_S`` seconds, by second."""

    total: int = 0
    _slots: dict[int, int] = field(factory=dict)
    """Amounts by second, in ascending order; only seconds in which something was charged."""
    _last: int = -1
    """The last second in which something was charged, even if all of it was taken back."""
    _changed_s: float = math.inf
    """The earliest second that changed since ``changes`` was called."""

    def slots(self) -> list[tuple[int, int]]:
        """(second, amount) of each second in which something was charged."""
        self._changed_s = 0.0
        return self.changes()

    def changes(self) -> list[tuple[int, int]]:
        """The slots from the first one on that changed since the last call."""
        found: list[tuple[int, int]] = []
        for second, amount in reversed(self._slots.items()):
            if second < self._changed_s:
                break
            found.append((second, amount))
        self._changed_s = math.inf
        return found[::-1]

    def replace(self, slots: Sequence[tuple[int, int]]) -> None:
        """``slots`` stand for all from the first of them on, as another window's ``changes``."""
        if not slots:
            return
        for second in [known for known in self._slots if known >= slots[0][0]]:
            self.total -= self._slots.pop(second)
        for second, amount in slots:
            self._slots[second] = self._slots.get(second, 0) + amount
            self.total += amount
        self._last = max(self._last, slots[-1][0])

    def advance(self, now_s: float) -> None:
        """Forget what left the window."""
        slots, last = self._slots, int(now_s) - WINDOW_S - 1
        while slots and (first := next(iter(slots))) <= last:
            self.total -= slots.pop(first)

    def add(self, second: int, amount: int) -> None:
        """Charge in ``second``: the present one, or one that was charged before."""
        slots = self._slots
        try:
            slots[second] += amount
        except KeyError:
            slots[second] = amount
        self.total += amount
        self._last = max(self._last, second)
        self._changed_s = min(self._changed_s, second)

    def take_back(self, second: int, amount: int) -> None:
        """Undo a part of what was charged in ``second``; nothing if that left the window."""
        if second in self._slots:
            self.add(second, -amount)

    def wait_s(self, now_s: float, excess: int) -> float:
        """Seconds until at least ``excess`` of the total has left the window."""
        leaves_s = now_s
        for second, amount in self._slots.items():
            if excess <= 0:
                break
            excess -= amount
            leaves_s = second + WINDOW_S + 1
        return max(0.0, leaves_s - now_s)

    def reset_s(self, now_s: float) -> float:
        """Seconds until everything has left the window."""
        if self._slots.get(self._last):
            return self._last + WINDOW_S + 1 - now_s
        for second, amount in reversed(self._slots.items()):
            if amount:
                return second + WINDOW_S + 1 - now_s
        return 0.0


@define
class _Usage:
    requests: SlidingWindow = field(factory=SlidingWindow)
    tokens: SlidingWindow = field(factory=SlidingWindow)
    running: int = 0
    second: int = -1
    """Of the monotonic clock; the windows are those of this second."""

    def advance(self, now_s: float) -> None:
        self.requests.advance(now_s)
        self.tokens.advance(now_s)
        self.second = int(now_s)


@define
class Settlement:
    """Requests of one ticket that ended, all together."""

    ticket: int
    count: int
    unreached: int = 0
    """Those of them that reached no worker: they cost nothing."""
    below: int = 0
    """Tokens by which the others took less than they were charged, each of them that did."""
    beyond: int = 0
    """Tokens by which they took more, each of them that did."""


@define
class _Ticket:
    """A request that was admitted, or several that were admitted together."""

    principal: str
    limits: Limits
    """Those of its admission: what they do not name was not charged."""
    tokens: int
    """Of each request."""
    second: int
    """Of its admission, by the monotonic clock."""
    day: int
    left: int
    """Requests that have not been settled."""


@define
class _Door:
    incarnation: str
    tickets: dict[int, _Ticket] = field(factory=dict)


class Ledger:
    """The accounts of all principals with limits, for one front door or several.

    A door numbers its tickets itself: each is for one request, or for several. Accounts are
    forgotten a minute after their last request, except for the tokens of the day, one number for
    each principal with a limit for the day.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Usage] = {}
        """The one used longest ago first."""
        self._doors: dict[str, _Door] = {}
        self._day = 0
        self._day_ends_s = float(DAY_S)
        self._day_tokens: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of accounts in memory."""
        return len(self._accounts)

    def door_opened(
        self, door: str, incarnation: str, left: Mapping[int, int] | None = None
    ) -> None:
        """A door has come, or come back, and says how many requests of its tickets are ``left``.

        Of a former process of the same name nothing runs any more; of the same process, nothing
        but those. What such requests were charged stays charged, as nobody knows what they
        took. A door that is gone and has not come back keeps its running requests.
        """
        known = self._doors.get(door)
        kept: dict[int, _Ticket] = {}
        if known is not None:
            same = known.incarnation == incarnation
            for number, ticket in known.tickets.items():
                still = min(ticket.left, left.get(number, 0)) if same and left else 0
                # The account is kept while requests run.
                self._accounts[ticket.principal].running -= ticket.left - still
                ticket.left = still
                if still:
                    kept[number] = ticket
        self._doors[door] = _Door(incarnation, kept)

    def admit(
        self, door: str, number: int, principal: str, limits: Limits, tokens: int, now: Moment
    ) -> Standing | Refusal:
        """Charge a request, unless it is beyond a limit: then nothing is charged.

        ``door`` has opened, and ``number`` is new among its tickets.
        """
        self._turn_day(now)
        account = self._touched(principal, now.monotonic_s)
        refused = self._refused(account, principal, limits, tokens, now)
        if refused is not None:
            limit, retry_after_s = refused
            return Refusal(limit, retry_after_s, self._standing(account, principal, limits, now))
        ticket = self._charge(1, principal, limits, tokens, account)
        self._doors[door].tickets[number] = ticket
        # Both windows were charged in this second, unless there were no tokens to charge.
        just_now_s = account.second + WINDOW_S + 1 - now.monotonic_s if tokens else None
        return self._standing(account, principal, limits, now, just_now_s)

    def admit_ahead(
        self,
        door: str,
        number: int,
        count: int,
        principal: str,
        limits: Limits,
        tokens: int,
        now: Moment,
    ) -> int:
        """Charge requests that may come, at once; returns how many, 0 to ``count``.

        They have one ticket, ``number``. A principal that is near one of its limits gets none.
        """
        self._turn_day(now)
        account = self._touched(principal, now.monotonic_s)
        left = [count]
        if (most := limits.requests_per_minute) is not None:
            left.append((most - account.requests.total) // _AHEAD_SHARE)
        if (most := limits.concurrent_requests) is not None:
            left.append((most - account.running) // _AHEAD_SHARE)
        room = max(tokens, 1) * _AHEAD_SHARE
        if (most := limits.tokens_per_minute) is not None:
            left.append((most - account.tokens.total) // room)
        if (most := limits.tokens_per_day) is not None:
            left.append((most - self._day_tokens.get(principal, 0)) // room)
        count = max(0, min(left))
        if count:
            ticket = self._charge(count, principal, limits, tokens, account)
            self._doors[door].tickets[number] = ticket
        return count

    def standing(self, principal: str, limits: Limits, now: Moment) -> Standing:
        """How far the principal is from its limits."""
        self._turn_day(now)
        account = self._touched(principal, now.monotonic_s)
        return self._standing(account, principal, limits, now)

    def settle(self, door: str, ended: Iterable[Settlement], now: Moment) -> set[str]:
        """Requests ended. Returns their principals.

        Tickets that are not known, or not any more, are passed over, and nobody gets back more
        than was charged.
        """
        known = self._doors.get(door)
        if known is None:
            return set()
        self._turn_day(now)
        principals = set()
        for one in ended:
            if (ticket := known.tickets.get(one.ticket)) is not None:
                self._settle(ticket, one, now.monotonic_s)
                principals.add(ticket.principal)
                if not ticket.left:
                    del known.tickets[one.ticket]
        return principals

    def accounts(self, now: Moment) -> tuple[int, list[Account]]:
        """The day, counted since 1970, and everything that was used and still counts."""
        self._turn_day(now)
        names = {**dict.fromkeys(self._day_tokens), **dict.fromkeys(self._accounts)}
        found = []
        for name in names:
            account = self._accounts.get(name) or _Usage()
            account.advance(now.monotonic_s)
            used = self._day_tokens.get(name, 0)
            if used or account.requests.total or account.tokens.total:
                requests, tokens = account.requests.slots(), account.tokens.slots()
                found.append(Account(name, requests, tokens, used))
        return self._day, found

    def changes(self, principals: Iterable[str], now: Moment) -> tuple[int, list[Account]]:
        """As ``accounts``, of ``principals``, and of this minute only what changed.

        That is since the last call of this or of ``accounts``.
        """
        self._turn_day(now)
        found = []
        for name in principals:
            account, used = self._accounts.get(name) or _Usage(), self._day_tokens.get(name, 0)
            requests, tokens = account.requests.changes(), account.tokens.changes()
            found.append(Account(name, requests, tokens, used))
        return self._day, found

    def restore(self, day: int, accounts: Iterable[Account], now: Moment) -> None:
        """Continue with ``accounts`` or ``changes`` of another ledger on this machine."""
        if day != self._day:
            self._begin_day(day)
        for one in accounts:
            account = self._touched(one.principal, now.monotonic_s)
            account.requests.replace(one.requests)
            account.tokens.replace(one.tokens)
            account.advance(now.monotonic_s)
            if one.day_tokens:
                self._day_tokens[one.principal] = one.day_tokens
            else:
                self._day_tokens.pop(one.principal, None)

    def running(self, principal: str) -> int:
        """Requests of the principal that run now."""
        account = self._accounts.get(principal)
        return 0 if account is None else account.running

    def _charge(
        self, count: int, principal: str, limits: Limits, tokens: int, account: _Usage
    ) -> _Ticket:
        """Charge ``count`` requests of ``tokens`` each, in the account's second."""
        second = account.second
        account.running += count
        if limits.requests_per_minute is not None:
            account.requests.add(second, count)
        if limits.tokens_per_minute is not None:
            account.tokens.add(second, count * tokens)
        if limits.tokens_per_day is not None:
            used = self._day_tokens.get(principal, 0)
            self._day_tokens[principal] = used + count * tokens
        return _Ticket(principal, limits, tokens, second, self._day, count)

    def _settle(self, ticket: _Ticket, ended: Settlement, now_s: float) -> None:
        count = min(ended.count, ticket.left)
        unreached = min(ended.unreached, count)
        below = min(ended.below, (count - unreached) * ticket.tokens) + unreached * ticket.tokens
        beyond = ended.beyond
        ticket.left -= count
        limits = ticket.limits
        account = self._touched(ticket.principal, now_s)
        account.running -= count
        if unreached and limits.requests_per_minute is not None:
            account.requests.take_back(ticket.second, unreached)
        if limits.tokens_per_minute is not None:
            if beyond:
                account.tokens.add(account.second, beyond)
            if below:
                account.tokens.take_back(ticket.second, below)
        if limits.tokens_per_day is not None and (beyond or ticket.day == self._day):
            used = self._day_tokens.get(ticket.principal, 0)
            given_back = below if ticket.day == self._day else 0
            self._day_tokens[ticket.principal] = used + beyond - given_back

    def _touched(self, principal: str, now_s: float) -> _Usage:
        accounts, second = self._accounts, int(now_s)
        account = accounts.get(principal)
        if account is not None and account.second == second:
            return account
        account = accounts.pop(principal, None) or _Usage()
        account.advance(now_s)
        accounts[principal] = account
        for _ in range(_CHECKED_FOR_IDLENESS):
            name = next(iter(accounts))
            oldest = accounts[name]
            if second - oldest.second <= WINDOW_S + 1:
                break
            del accounts[name]
            if oldest.running:
                oldest.advance(now_s)
                accounts[name] = oldest
        return account

    def _turn_day(self, now: Moment) -> None:
        if now.unix_s >= self._day_ends_s:
            self._begin_day(int(now.unix_s // DAY_S))

    def _begin_day(self, day: int) -> None:
        self._day, self._day_tokens = day, {}
        self._day_ends_s = (day + 1.0) * DAY_S

    def _refused(
        self, account: _Usage, principal: str, limits: Limits, tokens: int, now: Moment
    ) -> tuple[LimitName, float | None] | None:
        """The limit that refuses a request for the longest time, and that time; None: for ever."""
        now_s = now.monotonic_s
        found: list[tuple[LimitName, float | None]] = []
        most = limits.requests_per_minute
        if most is not None and account.requests.total + 1 > most:
            wait_s = account.requests.wait_s(now_s, account.requests.total + 1 - most)
            found.append(("requests_per_minute", wait_s if most else None))
        most = limits.tokens_per_minute
        if most is not None and account.tokens.total + tokens > most:
            wait_s = account.tokens.wait_s(now_s, account.tokens.total + tokens - most)
            found.append(("tokens_per_minute", wait_s if tokens <= most else None))
        most = limits.tokens_per_day
        if most is not None and self._day_tokens.get(principal, 0) + tokens > most:
            found.append(("tokens_per_day", self._day_left_s(now) if tokens <= most else None))
        most = limits.concurrent_requests
        if most is not None and account.running + 1 > most:
            found.append(("concurrent_requests", _BUSY_RETRY_S if most else None))
        if not found:
            return None
        return max(found, key=lambda each: float("inf") if each[1] is None else each[1])

    def _day_left_s(self, now: Moment) -> float:
        return max(0.0, self._day_ends_s - now.unix_s)

    def _standing(
        self,
        account: _Usage,
        principal: str,
        limits: Limits,
        now: Moment,
        reset_s: float | None = None,
    ) -> Standing:
        """``reset_s``: that of both windows, if known."""
        now_s = now.monotonic_s
        requests, remaining_requests, reset_requests_s = limits.requests_per_minute, None, None
        if requests is not None:
            window = account.requests
            remaining_requests = max(0, requests - window.total)
            reset_requests_s = window.reset_s(now_s) if reset_s is None else reset_s
        tokens, remaining_tokens, reset_tokens_s = limits.tokens_per_minute, None, None
        if tokens is not None:
            remaining_tokens = max(0, tokens - account.tokens.total)
            reset_tokens_s = account.tokens.reset_s(now_s) if reset_s is None else reset_s
        elif limits.tokens_per_day is not None:
            tokens = limits.tokens_per_day
            used = self._day_tokens.get(principal, 0)
            remaining_tokens, reset_tokens_s = max(0, tokens - used), 0.0
            if used:
                reset_tokens_s = self._day_left_s(now)
        return Standing(
            requests, remaining_requests, reset_requests_s,
            tokens, remaining_tokens, reset_tokens_s,
        )  # fmt: skip
