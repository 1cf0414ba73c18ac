"""The ledger against a plain log of what was charged when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from attrs import define
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from commutator.contract.principal import Limits
from commutator.tenants.ledger import (
    DAY_S,
    UNSTATED_ANSWER_TOKENS,
    WINDOW_S,
    Account,
    Ledger,
    Moment,
    Refusal,
    Settlement,
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


def ended(number: int, charged: int, took: int | None) -> list[Settlement]:
    """What a door reports of one request, which was charged so many tokens."""
    more = 0 if took is None else took - charged
    unreached = int(took is None)
    return [Settlement(number, 1, unreached, below=max(0, -more), beyond=max(0, more))]


class LedgerMachine(RuleBasedStateMachine):
    """Random requests of two principals at two doors, which are killed and cut off at random."""

    running = Bundle("running")

    @initialize(
        requests=st.none() | st.integers(1, 6),
        tokens=st.none() | st.integers(1, 100),
        day=st.none() | st.integers(1, 300),
        concurrent=st.none() | st.integers(1, 4),
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
        self.numbers = itertools.count()
        self.incarnations = itertools.count()
        self.log: list[Charge] = []
        self.live: list[Running] = []
        for door in DOORS:
            self.ledger.door_opened(door, f"first {door}")

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
        return sum(one.charge.principal == principal for one in self.live)

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
        requests = self.charged(principal, "requests", WINDOW_S) + 1
        taken = self.charged(principal, "tokens", WINDOW_S) + tokens
        if isinstance(answer, Refusal):
            self.check_refusal(answer, principal, tokens)
            return None
        for used, limit in (
            (requests, limits.requests_per_minute),
            (taken, limits.tokens_per_minute),
            (self.today(principal) + tokens, limits.tokens_per_day),
            (self.count(principal) + 1, limits.concurrent_requests),
        ):
            assert limit is None or used <= limit
        charge = Charge(principal, self.now_s, 1, tokens, self.day)
        self.log.append(charge)
        one = Running(door, number, charge, tokens)
        self.live.append(one)
        return one

    def check_refusal(self, refusal: Refusal, principal: str, tokens: int) -> None:
        """It is beyond its limit, and by waiting as told it comes below that limit."""
        limits, most = self.limits, getattr(self.limits, refusal.limit)
        longest_s = WINDOW_S + 1
        used = {
            "requests_per_minute": self.charged(principal, "requests", longest_s) + 1,
            "tokens_per_minute": self.charged(principal, "tokens", longest_s) + tokens,
            "tokens_per_day": self.today(principal) + tokens,
            "concurrent_requests": self.count(principal) + 1,
        }[refusal.limit]
        assert used > most
        if refusal.retry_after_s is None:
            assert refusal.limit in {"tokens_per_minute", "tokens_per_day"}
            assert tokens > most
            return
        assert refusal.retry_after_s >= 0
        if refusal.limit != "concurrent_requests" and limits.concurrent_requests is None:
            self.now_s += refusal.retry_after_s + 1e-3
            again = self.ledger.admit(
                DOORS[0], next(self.numbers), principal, limits, tokens, self.now
            )
            assert not isinstance(again, Refusal) or again.limit != refusal.limit
            if not isinstance(again, Refusal):
                self.log.append(Charge(principal, self.now_s, 1, tokens, self.day))

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
        if tokens is None:
            one.charge.requests = 0
        taken = tokens or 0
        if taken <= one.tokens:
            one.charge.tokens = taken
        else:
            beyond = taken - one.tokens
            self.log.append(Charge(one.charge.principal, self.now_s, 0, beyond, self.day))

    @rule(door=st.sampled_from(DOORS), killed=st.booleans(), data=st.data())
    def come_back(self, door: str, killed: bool, data: st.DataObject) -> None:
        """A door is killed, or loses its connection with some of its messages."""
        mine = [one for one in self.live if one.door == door]
        if killed:
            kept: list[Running] = []
            self.ledger.door_opened(door, f"process {next(self.incarnations)}")
        else:
            kept = [one for one in mine if data.draw(st.booleans())]
            incarnation = self.ledger._doors[door].incarnation
            self.ledger.door_opened(door, incarnation, {one.number: 1 for one in kept})
        self.live = [one for one in self.live if one.door != door or one in kept]

    @rule()
    def what_a_copy_got_in_parts_is_the_whole(self) -> None:
        self.copy.restore(*self.ledger.changes(sorted(self.not_copied), self.now), self.now)
        self.not_copied.clear()
        for account in self.copy._accounts.values():
            for window in (account.requests, account.tokens):
                slots = list(window._slots.items())
                assert window.reset_s(self.now_s) == seconds_to_reset(slots, self.now_s)
        copied, now = Ledger(), self.now
        copied.restore(*self.copy.accounts(now), now)
        assert sorted(map(without_zeros, copied.accounts(now)[1])) == sorted(
            map(without_zeros, self.ledger.accounts(now)[1])
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
            assert account.running >= self.count(principal)
            account.tokens.advance(self.now_s)
            account.requests.advance(self.now_s)
            for window, what in ((account.tokens, "tokens"), (account.requests, "requests")):
                slots = list(window._slots.items())
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


def seconds_to_reset(slots: list[tuple[int, int]], now_s: float) -> float:
    leaves_s = [second + WINDOW_S + 1 for second, amount in slots if amount]
    return max(leaves_s, default=now_s) - now_s


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
    ledger.door_opened("d", "1")
    for number in range(3):
        assert not isinstance(ledger.admit("d", number, "ada", limits, 10, now), Refusal)
    for number in range(3):
        ledger.settle("d", ended(number, 10, None), Moment(20.0, 20.0))
    standing = ledger.admit("d", 9, "ada", limits, 50, Moment(21.0, 21.0))
    assert not isinstance(standing, Refusal)
    assert (standing.remaining_requests, standing.remaining_tokens) == (2, 0)


def test_idle_accounts_are_forgotten() -> None:
    ledger, limits = Ledger(), Limits(requests_per_minute=3)
    ledger.door_opened("d", "1")
    for number in range(50_000):
        at_s = number / 100
        assert not isinstance(
            ledger.admit("d", number, f"salt-{number}", limits, 1, Moment(at_s, at_s)), Refusal
        )
        ledger.settle("d", ended(number, 1, 1), Moment(at_s, at_s))
    assert len(ledger) <= 100 * (WINDOW_S + 2)


def test_a_running_request_keeps_its_account() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1)
    ledger.door_opened("d", "1")
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
    ledger.door_opened("d", "1")
    ledger.admit("d", 1, "ada", limits, 10, BEFORE)
    ledger.settle("d", ended(1, 10, took), AFTER)
    ledger.admit("d", 2, "ada", limits, 50, AFTER)
    assert isinstance(ledger.admit("d", 3, "ada", limits, left - 49, AFTER), Refusal)
    assert not isinstance(ledger.admit("d", 4, "ada", limits, left - 50, AFTER), Refusal)


def test_of_a_former_process_of_a_door_nothing_runs_whatever_its_successor_says() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1)
    ledger.door_opened("d", "1")
    ledger.admit("d", 1, "ada", limits, 1, BEFORE)
    ledger.door_opened("d", "1", {1: 1})
    assert ledger.running("ada") == 1
    ledger.door_opened("d", "2", {1: 1})
    assert ledger.running("ada") == 0


def test_what_a_request_is_charged_that_does_not_state_its_longest_answer() -> None:
    assert unstated_tokens(Limits(), 10, 2) == 10 + 2 * UNSTATED_ANSWER_TOKENS
    assert unstated_tokens(Limits(tokens_per_minute=100), 10, 1) == 100
    assert unstated_tokens(Limits(tokens_per_minute=100), 200, 1) == 200
    assert unstated_tokens(Limits(tokens_per_minute=100, tokens_per_day=50), 10, 1) == 50


def test_a_door_that_comes_back_keeps_as_many_requests_of_a_ticket_as_it_says() -> None:
    ledger, limits = Ledger(), Limits(concurrent_requests=1_000)
    ledger.door_opened("d", "1")
    assert ledger.admit_ahead("d", 1, 5, "ada", limits, 1, BEFORE) == 5
    ledger.door_opened("d", "1", {1: 3})
    assert ledger.running("ada") == 3
    ledger.door_opened("d", "1", {1: 4})
    assert ledger.running("ada") == 3
    ledger.settle("d", [Settlement(1, 5)], AFTER)
    assert ledger.running("ada") == 0


@given(
    ahead=st.lists(st.tuples(st.integers(1, 5), amounts), min_size=1, max_size=4),
    took=st.lists(st.none() | amounts, max_size=5),
    settled_s=st.sampled_from([10.2, 40.0, 75.0]),
    day=st.sampled_from([0.0, DAY_S - 20.0]),
)
def test_what_was_charged_together_is_settled_together_as_one_by_one(
    ahead: list[tuple[int, int]], took: list[int | None], settled_s: float, day: float
) -> None:
    """Of two ledgers, one admits and settles each request by itself; a day may turn between."""
    limits = Limits(requests_per_minute=10_000, tokens_per_minute=10_000, tokens_per_day=100_000)
    together, apart = Ledger(), Ledger()
    began, later = Moment(10.0, day + 10.0), Moment(settled_s, day + settled_s)
    for ledger in (together, apart):
        ledger.door_opened("d", "")
    for number, (count, tokens) in enumerate(ahead):
        assert together.admit_ahead("d", number, count, "ada", limits, tokens, began) == count
        for one in range(count):
            apart.admit("d", 10 * number + one, "ada", limits, tokens, began)
    running = 0
    for number, (count, tokens) in enumerate(ahead):
        all_ended = Settlement(number, 0)
        for one, tokens_taken in enumerate(took[:count]):
            (one_ended,) = ended(10 * number + one, tokens, tokens_taken)
            apart.settle("d", [one_ended], later)
            all_ended.count += 1
            all_ended.unreached += one_ended.unreached
            all_ended.below += one_ended.below
            all_ended.beyond += one_ended.beyond
        together.settle("d", [all_ended], later)
        running += count - all_ended.count
    assert together.accounts(later) == apart.accounts(later)
    assert together.running("ada") == apart.running("ada") == running


def test_a_settlement_gives_back_no_more_than_was_charged() -> None:
    ledger, limits = Ledger(), Limits(requests_per_minute=9, tokens_per_minute=100)
    ledger.door_opened("d", "1")
    for number in (1, 2):
        ledger.admit("d", number, "ada", limits, 10, BEFORE)
    ledger.settle("d", [Settlement(1, count=7, unreached=5, below=900)], BEFORE)
    assert ledger.running("ada") == 1
    (account,) = ledger.accounts(BEFORE)[1]
    assert (account.requests, account.tokens) == ([(0, 1)], [(0, 10)])
