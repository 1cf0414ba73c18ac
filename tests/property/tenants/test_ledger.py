"""The ledger against a plain log of what was charged when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import pytest
from attrs import define, field
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from commutator.contract.principal import Limits
from commutator_limits.ledger import (
    DAY_S,
    UNSTATED_ANSWER_TOKENS,
    WINDOW_S,
    Account,
    Ledger,
    Moment,
    Refusal,
    Settlement,
    Use,
    unstated_tokens,
)

DOORS = ("frontend-0", "frontend-1")
PRINCIPALS = ("ada", "bob")

amounts = st.integers(0, 40)


@define
class Charge:
    principal: str
    at_s: float
    requests: int
    tokens: int
    day: int


@define
class Running:
    door: str
    number: int
    charge: Charge
    tokens: int
    """As charged at admission."""
    gives_back: bool = True
    """Whether what it does not take is free again."""


@define
class Held:
    """What a door may admit of a principal without asking, and what it has not reported."""

    requests: int = 0
    tokens: int = 0
    unreported: list[int] = field(factory=list)
    """Tokens of each request."""


def ended(number: int, charged: int, took: int | None) -> list[Settlement]:
    """What a door reports of one request, which was charged so many tokens."""
    more = 0 if took is None else took - charged
    unreached = int(took is None)
    below = charged if took is None else max(0, -more)
    return [Settlement(number, 1, unreached, below, beyond=max(0, more))]


def used(number: int, principal: str, requests: int, tokens: int) -> Use:
    """What a door reports of requests that still run."""
    return Use(principal, requests, tokens, Settlement(number, 0))


class LedgerMachine(RuleBasedStateMachine):
    """Random requests of two principals at two doors, which are killed and cut off at random."""

    running = Bundle("running")

    @initialize(
        requests=st.none() | st.integers(1, 6) | st.integers(16, 60),
        tokens=st.none() | st.integers(1, 100) | st.integers(500, 1_500),
        day=st.none() | st.integers(1, 300) | st.integers(500, 1_500),
        concurrent=st.none() | st.integers(1, 4) | st.integers(16, 60),
    )
    def begin(
        self, requests: int | None, tokens: int | None, day: int | None, concurrent: int | None
    ) -> None:
        self.limits = Limits(
            requests_per_minute=requests,
            tokens_per_minute=tokens,
            tokens_per_day=day,
            concurrent_requests=concurrent,
        )
        self.now_s = 1_000.25
        self.ledger = Ledger()
        self.copy = Ledger()
        self.not_copied: set[str] = set()
        self.copied: dict[str, tuple[float, int]] = {}
        """When, and on what day."""
        self.numbers = itertools.count()
        self.incarnations = itertools.count()
        self.log: list[Charge] = []
        self.live: list[Running] = []
        self.admitted: list[tuple[str, float, int]] = []
        """(principal, when, tokens) of requests that were admitted without asking."""
        self.held = {(door, principal): Held() for door in DOORS for principal in PRINCIPALS}
        for door in DOORS:
            self.ledger.door_opened(door, f"first {door}", self.now)

    @property
    def now(self) -> Moment:
        # Ten seconds before midnight, so that days change.
        return Moment(self.now_s, DAY_S * 7 - 1_010 + self.now_s)

    @property
    def day(self) -> int:
        return int(self.now.unix_s // DAY_S)

    def charged(self, principal: str, what: str, window_s: float) -> int:
        """By the log, in the time up to now."""
        since_s = self.now_s - window_s
        return sum(
            getattr(one, what)
            for one in self.log
            if one.principal == principal and one.at_s > since_s
        )

    def today(self, principal: str) -> int:
        mine = [one for one in self.log if one.principal == principal and one.day == self.day]
        return sum(one.tokens for one in mine)

    def count(self, principal: str) -> int:
        """Requests that run, and that may."""
        running = sum(one.charge.principal == principal for one in self.live)
        return running + self.holds(principal, "requests") + self.unreported(principal)

    def holds(self, principal: str, what: str) -> int:
        return sum(getattr(self.held[door, principal], what) for door in DOORS)

    def unreported(self, principal: str) -> int:
        return sum(len(self.held[door, principal].unreported) for door in DOORS)

    def unreported_tokens(self, principal: str) -> int:
        return sum(sum(self.held[door, principal].unreported) for door in DOORS)

    def most_used(self, principal: str, window_s: float) -> dict[str, int]:
        """By the names of limits; what doors hold counts as used."""
        tokens = self.holds(principal, "tokens") + self.unreported_tokens(principal)
        requests = self.holds(principal, "requests") + self.unreported(principal)
        return {
            "requests_per_minute": self.charged(principal, "requests", window_s) + requests,
            "tokens_per_minute": self.charged(principal, "tokens", window_s) + tokens,
            "tokens_per_day": self.today(principal) + tokens,
            "concurrent_requests": self.count(principal),
        }

    def check_limits(
        self, principal: str, of_requests: bool = True, of_tokens: bool = True
    ) -> None:
        """After some were admitted or allowed; what requests take in the end may be more."""
        for name, used in self.most_used(principal, WINDOW_S).items():
            limit = getattr(self.limits, name)
            if of_tokens if name.startswith("tokens") else of_requests:
                assert limit is None or used <= limit

    @rule(seconds=st.floats(0, 30) | st.sampled_from([59.5, 59.75, 60.0, 60.5, 61.0, DAY_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        target=running,
        door=st.sampled_from(DOORS),
        principal=st.sampled_from(PRINCIPALS),
        tokens=amounts,
    )
    def ask(self, door: str, principal: str, tokens: int) -> Any:
        number, limits = next(self.numbers), self.limits
        answer = self.ledger.admit(door, number, principal, limits, tokens, self.now)
        self.not_copied.add(principal)
        if isinstance(answer, Refusal):
            self.check_refusal(answer, principal, tokens)
            return None
        one = self.charge(door, number, principal, tokens)
        self.check_limits(principal)
        return one

    @rule(
        door=st.sampled_from(DOORS),
        principal=st.sampled_from(PRINCIPALS),
        tokens=amounts,
        count=st.integers(2, 70),
    )
    def flood(self, door: str, principal: str, tokens: int, count: int) -> None:
        for _ in range(count):
            if self.ask(door, principal, tokens) is None:
                break

    def charge(self, door: str, number: int, principal: str, tokens: int) -> Running:
        charge = Charge(principal, self.now_s, 1, tokens, self.day)
        self.log.append(charge)
        one = Running(door, number, charge, tokens)
        self.live.append(one)
        return one

    @rule(
        door=st.sampled_from(DOORS),
        principal=st.sampled_from(PRINCIPALS),
        requests=st.integers(0, 5),
        tokens=amounts,
    )
    def allow(self, door: str, principal: str, requests: int, tokens: int) -> None:
        ledger, limits, now = self.ledger, self.limits, self.now
        assume(limits != Limits())
        allowed = ledger.allow(door, principal, limits, requests, tokens, now)
        assert all(
            0 <= got <= asked for got, asked in zip(allowed, (requests, tokens), strict=True)
        )
        self.not_copied.add(principal)
        held = self.held[door, principal]
        held.requests += allowed[0]
        held.tokens += allowed[1]
        self.check_limits(principal, of_requests=allowed[0] > 0, of_tokens=allowed[1] > 0)
        standing = ledger.standing(principal, limits, now)
        most = self.most_used(principal, WINDOW_S)
        if limits.requests_per_minute is not None:
            left = limits.requests_per_minute - most["requests_per_minute"]
            assert standing.remaining_requests is not None
            assert 0 <= standing.remaining_requests <= max(0, left)

    @rule(data=st.data(), door=st.sampled_from(DOORS), principal=st.sampled_from(PRINCIPALS))
    def take(self, data: st.DataObject, door: str, principal: str) -> None:
        """The door admits without asking."""
        held = self.held[door, principal]
        if held.requests:
            tokens = data.draw(st.integers(0, held.tokens))
            held.requests -= 1
            held.tokens -= tokens
            held.unreported.append(tokens)
            self.admitted.append((principal, self.now_s, tokens))

    @rule(target=running, door=st.sampled_from(DOORS), principal=st.sampled_from(PRINCIPALS))
    def report(self, door: str, principal: str) -> Any:
        """One of the requests, or none."""
        unreported = self.held[door, principal].unreported
        if not unreported:
            return None
        number, tokens = next(self.numbers), unreported.pop()
        self.ledger.used(door, used(number, principal, 1, tokens), self.now)
        self.not_copied.add(principal)
        return self.charge(door, number, principal, tokens)

    @rule(door=st.sampled_from(DOORS), principal=st.sampled_from(PRINCIPALS))
    def give_back(self, door: str, principal: str) -> None:
        held = self.held[door, principal]
        if not held.unreported:
            self.ledger.returned(door, principal)
            self.not_copied.add(principal)
            held.requests = held.tokens = 0

    def check_refusal(self, refusal: Refusal, principal: str, tokens: int) -> None:
        """It is beyond its limit, and by waiting as told it comes below that limit."""
        limits, most = self.limits, getattr(self.limits, refusal.limit)
        more = tokens if refusal.limit.startswith("tokens") else 1
        assert self.most_used(principal, WINDOW_S + 1)[refusal.limit] + more > most
        if refusal.retry_after_s is None:
            assert refusal.limit in {"tokens_per_minute", "tokens_per_day"}
            assert tokens > most
            return
        assert refusal.retry_after_s >= 0
        if (
            refusal.limit != "concurrent_requests"
            and limits.concurrent_requests is None
            and not self.holds_anything(principal)
        ):
            self.now_s += refusal.retry_after_s + 1e-3
            again = self.ledger.admit(
                DOORS[0], next(self.numbers), principal, limits, tokens, self.now
            )
            assert not isinstance(again, Refusal) or again.limit != refusal.limit
            if not isinstance(again, Refusal):
                self.log.append(Charge(principal, self.now_s, 1, tokens, self.day))

    def holds_anything(self, principal: str) -> bool:
        mine = [self.held[door, principal] for door in DOORS]
        return any(one.requests or one.tokens or one.unreported for one in mine)

    @rule(one=consumes(running), tokens=st.none() | amounts)
    def end(self, one: Running | None, tokens: int | None) -> None:
        assume(one is not None and one in self.live)
        assert one is not None
        reported = ended(one.number, one.tokens, tokens)
        principals = self.ledger.settle(one.door, reported, self.now)
        assert principals == {one.charge.principal}
        self.not_copied |= principals
        # Said twice, counted once.
        assert self.ledger.settle(one.door, reported, self.now) == set()
        self.live.remove(one)
        taken = tokens or 0
        if not one.gives_back:
            taken = max(taken, one.tokens)
        elif tokens is None:
            one.charge.requests = 0
        if taken <= one.tokens:
            one.charge.tokens = taken
        else:
            beyond = taken - one.tokens
            self.log.append(Charge(one.charge.principal, self.now_s, 0, beyond, self.day))

    @rule(door=st.sampled_from(DOORS), killed=st.booleans(), data=st.data())
    def come_back(self, door: str, killed: bool, data: st.DataObject) -> None:
        """A door is killed, or loses its connection with some of its messages."""
        mine = [one for one in self.live if one.door == door]
        self.live = [one for one in self.live if one.door != door]
        for principal in PRINCIPALS:  # all that it was allowed is charged
            held = self.held.pop((door, principal))
            self.held[door, principal] = Held()
            self.not_copied.add(principal)
            requests = held.requests + len(held.unreported)
            tokens = held.tokens + sum(held.unreported)
            self.log.append(Charge(principal, self.now_s, requests, tokens, self.day))
            if not killed:
                for one_tokens in held.unreported:
                    charge = Charge(principal, self.now_s, 0, one_tokens, self.day)
                    mine.append(Running(door, next(self.numbers), charge, one_tokens, False))
        if killed:
            kept: list[Running] = []
            self.ledger.door_opened(door, f"process {next(self.incarnations)}", self.now)
        else:
            kept = [one for one in mine if data.draw(st.booleans())]
            incarnation = self.ledger._doors[door].incarnation
            left = {one.number: (1, one.charge.principal) for one in kept}
            self.ledger.door_opened(door, incarnation, self.now, left)
        self.live += kept

    @rule()
    def what_a_copy_got_in_parts_is_the_whole(self) -> None:
        self.copy.restore(*self.ledger.changes(sorted(self.not_copied), self.now), self.now)
        self.copied |= dict.fromkeys(self.not_copied, (self.now_s, self.day))
        self.not_copied.clear()
        for account in self.copy._accounts.values():
            for window in (account.requests, account.tokens):
                slots = window.charged()
                assert window.reset_s(self.now_s) == seconds_to_reset(slots, self.now_s)
        copied, now = Ledger(), self.now
        copied.restore(*self.copy.accounts(now), now)
        copies = {one.principal: one for one in copied.accounts(now)[1]}
        # Of another, as it says what has changed since it was called.
        for one in deepcopy(self.ledger).accounts(now)[1]:
            copy = copies.pop(one.principal, Account(one.principal, [], [], 0))
            if not self.holds_anything(one.principal):
                assert without_zeros(copy) == without_zeros(one)
                continue
            # What doors are allowed counted as used when the copy was made.
            copied_s, day = self.copied[one.principal]
            if day == self.day:
                assert copy.day_tokens == one.day_tokens
            if self.now_s - copied_s < WINDOW_S:
                assert amount(copy.requests) == amount(one.requests)
                assert amount(copy.tokens) == amount(one.tokens)
        assert not any(
            without_zeros(copy) != (copy.principal, [], [], 0) for copy in copies.values()
        )

    @invariant()
    def what_remains_is_what_the_log_says(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for principal in PRINCIPALS:
            account = self.ledger._accounts.get(principal)
            if account is None:
                assert self.charged(principal, "tokens", WINDOW_S) == 0 or self.limits == Limits()
                continue
            assert account.running + account.held_requests >= self.count(principal)
            self.check_admitted(principal)
            account.tokens.advance(self.now_s)
            account.requests.advance(self.now_s)
            for window, what in ((account.tokens, "tokens"), (account.requests, "requests")):
                slots = window.charged()
                assert slots == sorted(slots)
                assert window.total == sum(amount for _, amount in slots)
                assert len(slots) <= WINDOW_S + 1
                assert all(amount >= 0 for _, amount in slots)
                assert window.reset_s(self.now_s) == seconds_to_reset(slots, self.now_s)
                limit = getattr(self.limits, f"{what}_per_minute")
                if limit is not None:
                    least = self.charged(principal, what, WINDOW_S)
                    most = self.charged(principal, what, WINDOW_S + 1)
                    assert least <= window.total <= most

    def check_admitted(self, principal: str) -> None:
        """No more than the limits in a minute, by when doors admitted, not by what was charged."""
        since_s = self.now_s - WINDOW_S
        tokens = [one[2] for one in self.admitted if one[0] == principal and one[1] > since_s]
        limits = self.limits
        assert limits.requests_per_minute is None or len(tokens) <= limits.requests_per_minute
        assert limits.tokens_per_minute is None or sum(tokens) <= limits.tokens_per_minute


def seconds_to_reset(slots: list[tuple[int, int]], now_s: float) -> float:
    leaves_s = [second + WINDOW_S + 1 for second, amount in slots if amount]
    return max(leaves_s, default=now_s) - now_s


def amount(slots: Iterable[tuple[int, int]]) -> int:
    return sum(charged for _, charged in slots)


def without_zeros(account: Account) -> tuple[Any, ...]:
    requests = [slot for slot in account.requests if slot[1]]
    tokens = [slot for slot in account.tokens if slot[1]]
    return account.principal, requests, tokens, account.day_tokens


TestLedger = LedgerMachine.TestCase


def test_nothing_is_lost_when_everything_is_given_back() -> None:
    ledger, limits = (
        Ledger(),
        Limits(requests_per_minute=3, tokens_per_minute=50, tokens_per_day=60),
    )
    now = Moment(5.0, 5.0)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    for number in range(3):
        assert not isinstance(ledger.admit("d", number, "ada", limits, 10, now), Refusal)
    for number in range(3):
        ledger.settle("d", ended(number, 10, None), Moment(20.0, 20.0))
    standing = ledger.admit("d", 9, "ada", limits, 50, Moment(21.0, 21.0))
    assert not isinstance(standing, Refusal)
    assert (standing.remaining_requests, standing.remaining_tokens) == (2, 0)


def test_idle_accounts_are_forgotten() -> None:
    ledger, limits = Ledger(), Limits(requests_per_minute=3)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    for number in range(50_000):
        at_s = number / 100
        assert not isinstance(
            ledger.admit("d", number, f"salt-{number}", limits, 1, Moment(at_s, at_s)), Refusal
        )
        ledger.settle("d", ended(number, 1, 1), Moment(at_s, at_s))
    assert len(ledger) <= 100 * (WINDOW_S + 2)


def test_a_running_request_keeps_its_account() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    ledger.admit("d", 1, "ada", limits, 1, Moment(0.0, 0.0))
    for number in range(2, 200):
        at_s = number * 10.0
        ledger.admit("d", number, f"other-{number}", limits, 1, Moment(at_s, at_s))
        ledger.settle("d", ended(number, 1, 1), Moment(at_s, at_s))
    late = Moment(3000.0, 3000.0)
    refused = ledger.admit("d", 900, "ada", limits, 1, late)
    assert isinstance(refused, Refusal)
    assert refused.limit == "concurrent_requests"
    ledger.settle("d", ended(1, 1, 1), late)
    assert not isinstance(ledger.admit("d", 901, "ada", limits, 1, late), Refusal)


BEFORE, AFTER = (Moment(0.0, DAY_S - 10.0), Moment(20.0, DAY_S + 10.0))
"""Around a midnight of UTC."""


@pytest.mark.parametrize(("took", "left"), [(4, 100), (15, 95), (None, 100)])
def test_a_request_across_midnight_gives_nothing_back_to_the_new_day(
    took: int | None, left: int
) -> None:
    """What it takes beyond its charge is charged to the day on which it ends."""
    ledger, limits = Ledger(), Limits(tokens_per_day=100)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    ledger.admit("d", 1, "ada", limits, 10, BEFORE)
    ledger.settle("d", ended(1, 10, took), AFTER)
    ledger.admit("d", 2, "ada", limits, 50, AFTER)
    assert isinstance(ledger.admit("d", 3, "ada", limits, left - 49, AFTER), Refusal)
    assert not isinstance(ledger.admit("d", 4, "ada", limits, left - 50, AFTER), Refusal)


def test_of_a_former_process_of_a_door_nothing_runs_whatever_its_successor_says() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    ledger.admit("d", 1, "ada", limits, 1, BEFORE)
    ledger.door_opened("d", "1", BEFORE, {1: (1, "ada")})
    assert ledger.running("ada") == 1
    ledger.door_opened("d", "2", BEFORE, {1: (1, "ada")})
    assert ledger.running("ada") == 0


def test_what_a_request_is_charged_that_does_not_state_its_longest_answer() -> None:
    assert unstated_tokens(Limits(), 10, 2) == 10 + 2 * UNSTATED_ANSWER_TOKENS
    assert unstated_tokens(Limits(tokens_per_minute=100), 10, 1) == 100
    assert unstated_tokens(Limits(tokens_per_minute=100), 200, 1) == 200
    assert unstated_tokens(Limits(tokens_per_minute=100, tokens_per_day=50), 10, 1) == 50


def test_a_door_that_comes_back_keeps_as_many_requests_of_a_ticket_as_it_says() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1_000)
    ledger.door_opened("d", "1", BEFORE)
    assert ledger.allow("d", "ada", limits, 5, 5, BEFORE) == (5, 5)
    ledger.used("d", used(1, "ada", 5, 5), BEFORE)
    ledger.door_opened("d", "1", BEFORE, {1: (3, "ada")})
    assert ledger.running("ada") == 3
    ledger.door_opened("d", "1", BEFORE, {1: (4, "ada")})
    assert ledger.running("ada") == 3
    ledger.settle("d", [Settlement(1, 5)], AFTER)
    assert ledger.running("ada") == 0


@given(
    tickets=st.lists(st.lists(st.tuples(amounts, st.none() | amounts), max_size=5), max_size=4),
    settled_s=st.sampled_from([10.2, 40.0, 75.0]),
    day=st.sampled_from([0.0, DAY_S - 20.0]),
    before_report=st.integers(0, 5),
)
def test_what_was_charged_together_is_settled_together_as_one_by_one(
    tickets: list[list[tuple[int, int | None]]], settled_s: float, day: float, before_report: int
) -> None:
    """Of two ledgers, one admits and settles each request by itself; a day may turn between.

    Of each ticket the first requests end before the ledger hears of it.
    """
    limits = Limits(requests_per_minute=10_000, tokens_per_minute=10_000, tokens_per_day=100_000)
    together, apart = Ledger(), Ledger()
    began, later = Moment(10.0, day + 10.0), Moment(settled_s, day + settled_s)
    for ledger in (together, apart):
        ledger.door_opened("d", "", began)
    settled_apart: list[Settlement] = []
    settled_together: list[Settlement] = []
    for number, requests in enumerate(tickets):
        assert together.allow("d", "ada", limits, 5, 200, began) == (5, 200)
        early, late = Settlement(number, 0), Settlement(number, 0)
        for one, (charged, took) in enumerate(requests):
            apart.admit("d", 10 * number + one, "ada", limits, charged, began)
            (one_ended,) = ended(10 * number + one, charged, took)
            if one < before_report:
                apart.settle("d", [one_ended], began)
                settlement = early
            else:
                settled_apart.append(one_ended)
                settlement = late
            settlement.count += 1
            settlement.unreached += one_ended.unreached
            settlement.below += one_ended.below
            settlement.beyond += one_ended.beyond
        tokens = sum(charged for charged, _ in requests)
        together.used("d", Use("ada", len(requests), tokens, early), began)
        settled_together.append(late)
    together.returned("d", "ada")
    apart.settle("d", settled_apart, later)
    together.settle("d", settled_together, later)
    for ledger in (together, apart):
        assert ledger.running("ada") == 0
    assert [*map(without_zeros, together.accounts(later)[1])] == [
        *map(without_zeros, apart.accounts(later)[1])
    ]


@given(requests=st.integers(0, 400), tokens=st.integers(0, 4_000), used=st.integers(0, 90))
def test_a_door_is_allowed_enough_for_a_request_or_nothing_and_a_part_of_what_is_left(
    requests: int, tokens: int, used: int
) -> None:
    limits = Limits(requests_per_minute=100, tokens_per_day=1_000, concurrent_requests=200)
    ledger, now = Ledger(), Moment(5.0, 5.0)
    ledger.door_opened("d", "", now)
    for number in range(used):
        ledger.admit("d", number, "ada", limits, 10, now)
    allowed, allowed_tokens = ledger.allow("d", "ada", limits, requests, tokens, now)
    assert allowed <= (100 - used) / 16
    assert allowed_tokens <= (1_000 - 10 * used) / 16
    enough = requests and allowed_tokens >= tokens // requests
    assert (allowed > 0) == (enough and used <= 84)
    standing = ledger.standing("ada", limits, now)
    assert standing.remaining_requests == 100 - used - allowed
    assert standing.remaining_tokens == 1_000 - 10 * used - allowed_tokens
    ledger.returned("d", "ada")
    standing = ledger.standing("ada", limits, now)
    assert (standing.remaining_requests, standing.remaining_tokens) == (
        100 - used,
        1_000 - 10 * used,
    )


def test_a_settlement_gives_back_no_more_than_was_charged() -> None:
    ledger, limits = Ledger(), Limits(requests_per_minute=9, tokens_per_minute=100)
    ledger.door_opened("d", "1", Moment(0.0, 0.0))
    for number in (1, 2):
        ledger.admit("d", number, "ada", limits, 10, BEFORE)
    ledger.settle("d", [Settlement(1, count=7, unreached=5, below=900)], BEFORE)
    assert ledger.running("ada") == 1
    (account,) = ledger.accounts(BEFORE)[1]
    assert (account.requests, account.tokens) == ([(0, 1)], [(0, 10)])


MINUTE = Limits(requests_per_minute=32, tokens_per_minute=320)
NOW = Moment(5.0, 5.0)


def opened(limits: Limits, requests: int, tokens: int) -> Ledger:
    """A ledger with two doors, of which ``d`` is allowed that."""
    ledger = Ledger()
    for door in ("d", "e"):
        ledger.door_opened(door, "1", NOW)
    assert ledger.allow("d", "ada", limits, requests, tokens, NOW) == (requests, tokens)
    return ledger


def admitted(ledger: Ledger, limits: Limits, tokens: int = 0, at: Moment = NOW) -> int:
    """How many more requests the other door can admit."""
    numbers = itertools.count(100)
    for count, number in enumerate(numbers):
        if isinstance(ledger.admit("e", number, "ada", limits, tokens, at), Refusal):
            return count
    raise AssertionError


@pytest.mark.parametrize(
    ("limits", "tokens", "left"),
    [
        (Limits(requests_per_minute=32), 0, 30),
        (Limits(concurrent_requests=32), 0, 30),
        (Limits(tokens_per_minute=320), 10, 30),
        (Limits(tokens_per_day=320), 10, 30),
    ],
)
def test_what_a_door_is_allowed_is_nobody_elses_until_it_is_returned(
    limits: Limits, tokens: int, left: int
) -> None:
    ledger = opened(limits, 2, 20)
    assert admitted(ledger, limits, tokens) == left
    assert admitted(ledger, limits, tokens) == 0
    ledger.returned("d", "ada")
    ledger.returned("d", "ada")
    assert admitted(ledger, limits, tokens) == 2


def test_what_a_door_is_allowed_is_kept_for_it_however_long_it_takes() -> None:
    ledger, late = opened(MINUTE, 2, 20), Moment(3_000.0, 3_000.0)
    for number in range(1_000):
        at = Moment(5.0 + number, 5.0 + number)
        ledger.admit("e", number, f"other-{number}", MINUTE, 1, at)
    assert admitted(ledger, MINUTE, at=late) == 30
    ledger.used("d", used(1, "ada", 2, 20), Moment(3_060.0, 3_060.0))
    assert admitted(ledger, MINUTE, at=Moment(3_063.0, 3_063.0)) == 30


@pytest.mark.parametrize("incarnation", ["1", "2"])
def test_what_a_lost_door_was_allowed_is_charged_and_not_given_back(incarnation: str) -> None:
    ledger = opened(MINUTE, 2, 20)
    left = {7: (1, "ada")} if incarnation == "1" else {}
    ledger.door_opened("d", incarnation, NOW, left)
    assert ledger.running("ada") == len(left)
    ledger.settle("d", ended(7, 10, None), NOW)
    ledger.returned("d", "ada")
    assert ledger.running("ada") == 0
    assert admitted(ledger, MINUTE) == 30
    (account,) = ledger.accounts(NOW)[1]
    assert account.tokens == [(5, 20)]


def test_what_a_door_used_beyond_its_allowance_is_charged_and_releases_nothing_else() -> None:
    ledger = opened(MINUTE, 2, 20)
    ledger.used("d", used(1, "ada", 1, 15), NOW)
    ledger.used("d", used(2, "ada", 4, 15), NOW)
    assert ledger.allow("e", "ada", MINUTE, 1, 10, NOW) == (1, 10)
    standing = ledger.standing("ada", MINUTE, NOW)
    assert (standing.remaining_requests, standing.remaining_tokens) == (32 - 6, 320 - 40)
    ledger.used("d", used(3, "bob", 5, 50), NOW)
    assert ledger.running("bob") == 0
