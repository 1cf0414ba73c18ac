"""What principals have used, and whether one more request is within their limits. Pure.

A request is charged when it is admitted: one request, its prompts, and as many tokens as its
answers may take. When it ends, the charge becomes what it took: what it did not take is given back
where it was charged, what it took beyond is charged then. A minute is a sliding window of slots of
one second: in any 60 seconds, no more than the limit is charged at admissions. Slots make the
window up to a second longer, never shorter.

A front door may hold an allowance for a principal: requests and tokens that it can admit without
asking. They count as used for as long as it holds them, and are charged in the second in which it
reports that it used them: never before they were, so that none leaves the window too early.

A day is one of UTC. Day totals and windows live in the ledger's process, not on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from attrs import define, field, frozen

from commutator.contract.limiter import Standing
from commutator.contract.principal import Limits

WINDOW_S = 60
DAY_S = 86_400
_SLOTS = WINDOW_S + 1
"""Seconds of a window, with the present one."""
UNSTATED_ANSWER_TOKENS = 512
"""What an answer is charged at admission when its request does not state ``max_tokens``."""
_BUSY_RETRY_S = 1.0
"""Nobody knows when a running request ends, so this is when to ask again."""
_CHECKED_FOR_IDLENESS = 2
_NEVER = -1
"""A second of the monotonic clock in which nothing was charged."""
_ALLOWED_SHARE = 16
"""A door is allowed at most one part in this many of what each limit still has room for."""
_ALLOWED_SHARE_AT_ONCE = 4
"""The same for concurrent requests, whose limits are small numbers."""

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


Natural = Annotated[int, msgspec.Meta(ge=0)]


class Account(msgspec.Struct, array_like=True):
    """What one principal has used, for another ledger that continues with it."""

    principal: str
    requests: list[tuple[int, int]]
    """(second of the monotonic clock, requests), ascending, of this minute: all from the first."""
    tokens: list[tuple[int, int]]
    """The same of tokens."""
    day_tokens: int
    """Of this day of UTC."""


@define
class SlidingWindow:
    """What was charged in the last ``WINDOW_S`` seconds, by second."""

    total: int = 0
    _now: int = _NEVER
    """The second that ``advance`` was last called in: the window ends with it."""
    _amounts: list[int] = field(factory=list)
    """Of the seconds of the window, each at its number modulo ``_SLOTS``; empty until charged."""
    _last: int = _NEVER
    """The last second in which something was charged, even if all of it was taken back."""
    _changed_s: float = math.inf
    """The earliest second that changed since ``changes`` was called."""

    def charged(self, since: int = 0) -> list[tuple[int, int]]:
        """(second, amount) of each second, ``since`` or later, of which something is charged."""
        amounts = self._amounts
        if not amounts:
            return []
        seconds = range(max(since, self._now - WINDOW_S), self._now + 1)
        return [(one, amount) for one in seconds if (amount := amounts[one % _SLOTS])]

    def slots(self, held: int) -> list[tuple[int, int]]:
        """As ``charged``; ``held`` may be charged up to now, and is in the last of them."""
        slots = self.charged()
        if slots:  # else what was there and is not any more remains to be told
            self._changed_s = math.inf
        return self._with_held(slots, held)

    def changes(self, held: int) -> list[tuple[int, int]]:
        """The slots from the first one on that changed since the last call of this or ``slots``."""
        slots: list[tuple[int, int]] = []
        if self._changed_s < math.inf:
            first = int(self._changed_s)
            slots = self.charged(first)
            if not slots or slots[0][0] > first:
                slots.insert(0, (first, 0))  # of which nothing is charged any more
            self._changed_s = math.inf
        return self._with_held(slots, held)

    def _with_held(self, slots: list[tuple[int, int]], held: int) -> list[tuple[int, int]]:
        if held:
            now = self._now
            self._changed_s = now  # it is there only until the next call
            if slots and slots[-1][0] == now:
                slots.pop()
            slots.append((now, held + (self._amounts[now % _SLOTS] if self._amounts else 0)))
        return slots

    def replace(self, slots: Sequence[tuple[int, int]]) -> None:
        """``slots`` stand for all from the first of them on, as another window's ``changes``."""
        if not slots:
            return
        for second, amount in self.charged(slots[0][0]):
            self.add(second, -amount)
        for second, amount in slots:
            if self._now - WINDOW_S <= second <= self._now:
                self.add(second, amount)

    def advance(self, now_s: float) -> None:
        """Forget what left the window."""
        now, amounts = int(now_s), self._amounts
        if amounts:
            for second in range(self._now + 1, min(now, self._now + _SLOTS) + 1):
                self.total -= amounts[second % _SLOTS]
                amounts[second % _SLOTS] = 0
        self._now = max(self._now, now)

    def add(self, second: int, amount: int) -> None:
        """Charge in ``second``, of the window."""
        if not self._amounts:
            self._amounts = [0] * _SLOTS
        self._amounts[second % _SLOTS] += amount
        self.total += amount
        self._last = max(self._last, second)
        self._changed_s = min(self._changed_s, second)

    def take_back(self, second: int, amount: int) -> None:
        """Undo a part of what was charged in ``second``; nothing if that left the window."""
        if max(0, self._now - WINDOW_S) <= second:
            self.add(second, -amount)

    def wait_s(self, now_s: float, excess: int) -> float:
        """Seconds until at least ``excess`` of the total has left the window.

        Of more than the total nobody knows when it leaves.
        """
        if excess > self.total:
            return _BUSY_RETRY_S
        leaves_s = now_s
        for second, amount in self.charged():
            if excess <= 0:
                break
            excess -= amount
            leaves_s = second + WINDOW_S + 1
        return max(0.0, leaves_s - now_s)

    def reset_s(self, now_s: float) -> float:
        """Seconds until everything has left the window."""
        if not self.total:
            return 0.0
        last = self._last
        if last < self._now - WINDOW_S or not self._amounts[last % _SLOTS]:
            last = self.charged()[-1][0]
        return last + WINDOW_S + 1 - now_s


@define
class _Usage:
    requests: SlidingWindow = field(factory=SlidingWindow)
    tokens: SlidingWindow = field(factory=SlidingWindow)
    running: int = 0
    held_requests: int = 0
    """Of all doors' allowances: what it is not known of that it was used. So are the tokens."""
    held_tokens: int = 0
    limits: Limits = field(factory=Limits)
    """Those of the latest request, or allowance: what they do not name is not charged."""
    second: int = _NEVER
    """Of the monotonic clock; the windows are those of this second."""

    def advance(self, now_s: float) -> None:
        self.requests.advance(now_s)
        self.tokens.advance(now_s)
        self.second = int(now_s)

    def held(self) -> tuple[int, int, int]:
        """Requests and tokens of the minute, and tokens of the day, that doors are allowed."""
        limits, tokens = self.limits, self.held_tokens
        return (
            0 if limits.requests_per_minute is None else self.held_requests,
            0 if limits.tokens_per_minute is None else tokens,
            0 if limits.tokens_per_day is None else tokens,
        )


class Settlement(msgspec.Struct, array_like=True):
    """Requests of one ticket that ended, all together."""

    ticket: int
    count: Natural
    unreached: Natural = 0
    """Those of them that reached no worker: they cost nothing."""
    below: Natural = 0
    """Tokens by which they took less than they were charged, each of them that did."""
    beyond: Natural = 0
    """Tokens by which they took more, each of them that did."""


class Use(msgspec.Struct, array_like=True):
    """Requests that a door admitted of what it was allowed, since it reported the last."""

    principal: str
    requests: Natural
    tokens: Natural
    """That they were charged together."""
    ended: Settlement
    """Those of them that ended; its ticket stands for the others."""


@define
class _Ticket:
    """A request that was admitted, or several that were admitted together."""

    principal: str
    limits: Limits
    """Those of its admission: what they do not name was not charged."""
    tokens: int
    """Of all its requests: what they were charged, without what was given back."""
    second: int
    """In which they were charged, by the monotonic clock."""
    day: int
    left: int
    """Requests that have not been settled."""


@define
class _Allowance:
    """What a door may still admit, as far as the ledger knows."""

    limits: Limits
    requests: int
    tokens: int


@define
class _Door:
    incarnation: str
    tickets: dict[int, _Ticket] = field(factory=dict)
    allowances: dict[str, _Allowance] = field(factory=dict)
    """By principal."""


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
        self,
        door: str,
        incarnation: str,
        now: Moment,
        left: Mapping[int, tuple[int, str]] | None = None,
    ) -> None:
        """A door has come, or come back, and says how many requests of its tickets are ``left``.

        They are by number, with their principal. Of a former process of the same name nothing runs
        any more; of the same process, nothing but those. What such requests were charged stays
        charged, as nobody knows what they took, and what the door was allowed is charged, as nobody
        knows what of it was used. A door that is gone and has not come back keeps both.
        """
        self._turn_day(now)
        left = left or {}
        former = self._doors.get(door) or _Door(incarnation)
        known = former.allowances
        for principal, allowance in known.items():  # nobody knows what was used
            account = self._touched(principal, now.monotonic_s)
            requests, tokens = allowance.requests, allowance.tokens
            self._release(allowance, account, requests, tokens)
            self._charge(account, principal, allowance.limits, requests, tokens)
        kept: dict[int, _Ticket] = {}
        for running in former.tickets.values():
            self._accounts[running.principal].running -= running.left  # kept while requests run
        if former.incarnation == incarnation:
            for number, (count, principal) in left.items():
                ticket = former.tickets.get(number)
                if ticket is None:  # of what it was allowed, which was charged just now for good
                    limits = known[principal].limits if principal in known else Limits()
                    ticket = _Ticket(principal, limits, 0, _NEVER, self._day, count)
                ticket.left = min(ticket.left, count)
                self._touched(ticket.principal, now.monotonic_s).running += ticket.left
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
        account.limits = limits
        refused = self._refused(account, principal, limits, tokens, now)
        if refused is not None:
            limit, retry_after_s = refused
            return Refusal(limit, retry_after_s, self._standing(account, principal, limits, now))
        self._charge(account, principal, limits, 1, tokens)
        account.running += 1
        ticket = _Ticket(principal, limits, tokens, account.second, self._day, 1)
        self._doors[door].tickets[number] = ticket
        # Both windows were charged in this second, unless there were no tokens to charge.
        just_now_s = account.second + WINDOW_S + 1 - now.monotonic_s if tokens else None
        return self._standing(account, principal, limits, now, just_now_s)

    def allow(
        self,
        door: str,
        principal: str,
        limits: Limits,
        requests: int,
        tokens: int,
        now: Moment,
    ) -> tuple[int, int]:
        """Let the door admit so many more requests, of so many tokens together, without asking.

        Returns how many of both it may, up to what it asked for: of a principal that is near one of
        its limits, fewer, and nothing if that is not enough for one request. ``limits`` hold for
        all that it admits so.
        """
        self._turn_day(now)
        account = self._touched(principal, now.monotonic_s)
        left, left_tokens = [requests], [tokens]
        held, held_tokens = account.held_requests, account.held_tokens
        if (most := limits.requests_per_minute) is not None:
            left.append((most - account.requests.total - held) // _ALLOWED_SHARE)
        if (most := limits.concurrent_requests) is not None:
            left.append((most - account.running - held) // _ALLOWED_SHARE_AT_ONCE)
        if (most := limits.tokens_per_minute) is not None:
            left_tokens.append((most - account.tokens.total - held_tokens) // _ALLOWED_SHARE)
        if (most := limits.tokens_per_day) is not None:
            used = self._day_tokens.get(principal, 0)
            left_tokens.append((most - used - held_tokens) // _ALLOWED_SHARE)
        enough_tokens = tokens // max(1, requests)
        allowed, allowed_tokens = max(0, min(left)), max(0, min(left_tokens))
        if allowed < min(1, requests) or allowed_tokens < enough_tokens:
            return 0, 0
        requests, tokens = allowed, allowed_tokens
        if requests or tokens:
            known = self._doors[door].allowances
            allowance = known.get(principal)
            if allowance is None:
                allowance = known[principal] = _Allowance(limits, 0, 0)
            allowance.requests += requests
            allowance.tokens += tokens
            account.held_requests += requests
            account.held_tokens += tokens
            account.limits = limits
        return requests, tokens

    def used(self, door: str, use: Use, now: Moment) -> None:
        """The door admitted requests of what it was allowed.

        They are charged now, also what of them is beyond that. Without an allowance nothing is.
        """
        known, principal, ended = self._doors[door], use.principal, use.ended
        if (allowance := known.allowances.get(principal)) is None:
            return
        self._turn_day(now)
        account, limits = self._touched(principal, now.monotonic_s), allowance.limits
        self._release(allowance, account, use.requests, use.tokens)
        count = min(ended.count, use.requests)
        requests = use.requests - min(ended.unreached, count)
        tokens = use.tokens - min(ended.below, use.tokens)
        self._charge(account, principal, limits, requests, tokens + ended.beyond)
        if left := use.requests - count:
            account.running += left
            ticket = _Ticket(principal, limits, tokens, account.second, self._day, left)
            known.tickets[ended.ticket] = ticket

    def returned(self, door: str, principal: str) -> None:
        """The door admits no more of what it was allowed for the principal."""
        known = self._doors.get(door)
        allowance = None if known is None else known.allowances.pop(principal, None)
        if allowance is not None:
            account = self._accounts[principal]  # kept while something is held
            self._release(allowance, account, allowance.requests, allowance.tokens)

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
        """The day, counted since 1970, and everything that was used and still counts.

        What doors are allowed is in it as used.
        """
        self._turn_day(now)
        names = {**dict.fromkeys(self._day_tokens), **dict.fromkeys(self._accounts)}
        found = [self._account(name, SlidingWindow.slots, now) for name in names]
        return self._day, [one for one in found if one.requests or one.tokens or one.day_tokens]

    def changes(self, principals: Iterable[str], now: Moment) -> tuple[int, list[Account]]:
        """As ``accounts``, of ``principals``, and of this minute only what changed.

        That is since the last call of this or of ``accounts``.
        """
        self._turn_day(now)
        return self._day, [self._account(one, SlidingWindow.changes, now) for one in principals]

    def _account(
        self,
        principal: str,
        slots: Callable[[SlidingWindow, int], list[tuple[int, int]]],
        now: Moment,
    ) -> Account:
        account = self._accounts.get(principal) or _Usage()
        account.advance(now.monotonic_s)
        held, held_tokens, held_today = account.held()
        used = self._day_tokens.get(principal, 0) + held_today
        requests, tokens = slots(account.requests, held), slots(account.tokens, held_tokens)
        return Account(principal, requests, tokens, used)

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
        """Requests of the principal that run now, as far as the ledger was told."""
        account = self._accounts.get(principal)
        return 0 if account is None else account.running

    def _charge(
        self, account: _Usage, principal: str, limits: Limits, requests: int, tokens: int
    ) -> None:
        """Charge in the account's second."""
        if limits.requests_per_minute is not None:
            account.requests.add(account.second, requests)
        if limits.tokens_per_minute is not None:
            account.tokens.add(account.second, tokens)
        if limits.tokens_per_day is not None:
            self._day_tokens[principal] = self._day_tokens.get(principal, 0) + tokens

    def _release(self, allowance: _Allowance, account: _Usage, requests: int, tokens: int) -> None:
        requests, tokens = min(requests, allowance.requests), min(tokens, allowance.tokens)
        allowance.requests -= requests
        allowance.tokens -= tokens
        account.held_requests -= requests
        account.held_tokens -= tokens

    def _settle(self, ticket: _Ticket, ended: Settlement, now_s: float) -> None:
        count = min(ended.count, ticket.left)
        unreached = min(ended.unreached, count)
        below, beyond = min(ended.below, ticket.tokens), ended.beyond
        ticket.left -= count
        ticket.tokens -= below
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
            if oldest.running or oldest.held_requests or oldest.held_tokens:
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
        held, held_tokens = account.held_requests, account.held_tokens
        found: list[tuple[LimitName, float | None]] = []
        most = limits.requests_per_minute
        if most is not None and (excess := account.requests.total + held + 1 - most) > 0:
            wait_s = account.requests.wait_s(now_s, excess)
            found.append(("requests_per_minute", wait_s if most else None))
        most = limits.tokens_per_minute
        if most is not None and (excess := account.tokens.total + held_tokens + tokens - most) > 0:
            wait_s = account.tokens.wait_s(now_s, excess)
            found.append(("tokens_per_minute", wait_s if tokens <= most else None))
        most = limits.tokens_per_day
        if most is not None and self._day_tokens.get(principal, 0) + held_tokens + tokens > most:
            found.append(("tokens_per_day", self._day_left_s(now) if tokens <= most else None))
        most = limits.concurrent_requests
        if most is not None and account.running + held + 1 > most:
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
        held, held_tokens = account.held_requests, account.held_tokens
        if held or held_tokens:  # it may be used up to now
            reset_s = account.second + WINDOW_S + 1 - now_s
        requests, remaining_requests, reset_requests_s = limits.requests_per_minute, None, None
        if requests is not None:
            window = account.requests
            remaining_requests = max(0, requests - window.total - held)
            reset_requests_s = window.reset_s(now_s) if reset_s is None else reset_s
        tokens, remaining_tokens, reset_tokens_s = limits.tokens_per_minute, None, None
        if tokens is not None:
            remaining_tokens = max(0, tokens - account.tokens.total - held_tokens)
            reset_tokens_s = account.tokens.reset_s(now_s) if reset_s is None else reset_s
        elif limits.tokens_per_day is not None:
            tokens = limits.tokens_per_day
            used = self._day_tokens.get(principal, 0) + held_tokens
            remaining_tokens, reset_tokens_s = max(0, tokens - used), 0.0
            if used:
                reset_tokens_s = self._day_left_s(now)
        return Standing(
            requests, remaining_requests, reset_requests_s,
            tokens, remaining_tokens, reset_tokens_s,
        )  # fmt: skip
