"""What a front door counts of a request, from its beginning to its end."""

from __future__ import annotations

import pytest
from attrs import define
from tests.support.limits import ask

from commutator.contract.limiter import Standing, Ticket
from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError
from commutator_limits.ledger import WINDOW_S, Moment, Refusal
from commutator_limits.limiter import LocalLimiter

ADA = Principal(name="ada", limits=Limits(concurrent_requests=2))


@define
class Clock:
    """Stands still unless it is moved."""

    now_s: float = 1_000.0

    def __call__(self) -> Moment:
        return Moment(self.now_s, self.now_s)


def test_requests_in_hand_are_as_many_as_may_run_also_before_they_are_admitted() -> None:
    limiter = LocalLimiter("door")
    assert limiter.begin(ADA)
    assert limiter.begin(ADA)
    with pytest.raises(RateLimitError, match="at the same time"):
        limiter.begin(ADA)
    limiter.end(ADA, None, None)
    assert limiter.begin(ADA)
    with pytest.raises(RateLimitError, match="at the same time"):
        limiter.begin(ADA)
    limiter.end(ADA, None, None)
    limiter.end(ADA, None, None)
    assert not limiter._in_hand


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        (Limits(), False),
        (Limits(answers=1, max_model_len=10), False),
        (Limits(requests_per_minute=1), True),
        (Limits(tokens_per_minute=1), True),
        (Limits(tokens_per_day=1), True),
        (Limits(concurrent_requests=1), True),
    ],
)
def test_nothing_is_counted_of_a_principal_without_limits_that_count(
    limits: Limits, counts: bool
) -> None:
    assert LocalLimiter("door").begin(Principal(name="bob", limits=limits)) == counts


@pytest.mark.parametrize(("waited_s", "refused_s"), [(WINDOW_S + 0.75, 0.25), (20.0, 1.0)])
async def test_a_refusal_is_remembered_for_a_second_but_no_longer_than_it_holds(
    waited_s: float, refused_s: float
) -> None:
    clock = Clock()
    limiter = LocalLimiter("door", clock=clock)
    ada = Principal(name="ada", limits=Limits(requests_per_minute=1))
    assert isinstance(await ask(limiter, "ada", ada.limits, 1), Ticket)
    clock.now_s += waited_s
    with pytest.raises(RateLimitError):
        await limiter.admit(ada, 1, max_tokens=1)
    clock.now_s += refused_s - 0.01
    with pytest.raises(RateLimitError) as refused:
        limiter.begin(ada)
    assert isinstance(refused.value.standing, Standing)
    assert refused.value.standing.remaining_requests == 0
    clock.now_s += 0.01
    assert limiter.begin(ada)


async def test_what_may_fit_at_once_is_not_remembered() -> None:
    limiter = LocalLimiter("door")
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=100))
    await limiter.admit(ada, 1, max_tokens=59)
    with pytest.raises(RateLimitError, match="try again in"):
        await limiter.admit(ada, 1, max_tokens=59)
    with pytest.raises(RateLimitError, match="shorten it"):
        await limiter.admit(ada, 1, max_tokens=100)
    assert limiter.begin(ada)


@pytest.mark.security
def test_refused_principals_are_remembered_in_bounded_memory() -> None:
    limiter = LocalLimiter("door")
    for number in range(25_000):
        limiter._remember(f"p{number}", Refusal("requests_per_minute", 40.0, Standing()))
        assert len(limiter._refused) <= 10_000


@pytest.mark.security
async def test_what_a_door_is_allowed_is_remembered_of_so_many_principals_and_returned_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commutator_limits.limiter._MOST_SENDERS", 100)
    clock = Clock()
    limiter = LocalLimiter("door", clock=clock)
    limits = Limits(requests_per_minute=1_000)
    for number in range(1_000):
        assert isinstance(await ask(limiter, f"p{number}", limits, 1), Ticket)
        if number % 100 == 99:
            clock.now_s += 1.0
            limiter._report_and_ask()
            assert len(limiter._senders) <= 100
    assert sum(account.held_requests > 0 for account in limiter._ledger._accounts.values()) <= 100
    for _ in range(2):  # they are reported on, and silent for a minute then
        clock.now_s += 60.0
        limiter._report_and_ask()
    assert not limiter._senders
    assert not any(account.held_requests for account in limiter._ledger._accounts.values())


async def test_a_request_is_charged_its_prompts_and_what_its_answers_may_take() -> None:
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=1_000))
    assert (await LocalLimiter("door").admit(ada, 10, 2, 30)).charged == 70
    assert (await LocalLimiter("door").admit(ada, 10, 2)).charged == 1_000


@pytest.mark.parametrize("took", [None, 0, 30, 60, 75])
async def test_a_request_counts_as_what_it_took_be_that_less_or_more(took: int | None) -> None:
    limiter = LocalLimiter("door")
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=1_000, concurrent_requests=1))
    for _ in range(2):
        assert limiter.begin(ada)
        limiter.end(ada, await limiter.admit(ada, 10, max_tokens=30), took)
    ticket = await limiter.admit(ada, 0, max_tokens=0)
    assert ticket.standing.remaining_tokens == 1_000 - 2 * (took or 0)


async def test_requests_within_the_allowance_ask_nobody_and_are_told_what_is_left() -> None:
    limiter = LocalLimiter("door", clock=Clock(100.25))
    ada = Principal(name="ada", limits=Limits(requests_per_minute=1_000, tokens_per_minute=10_000))
    remaining: list[tuple[int, int]] = []
    asked = 0
    for _ in range(50):
        assert limiter.begin(ada)
        ticket = await limiter.admit(ada, 1, 1, 9)
        assert ticket.standing.remaining_requests is not None
        assert ticket.standing.remaining_tokens is not None
        asked += ticket.batch.number > 0
        remaining.append((ticket.standing.remaining_requests, ticket.standing.remaining_tokens))
        limiter.end(ada, ticket, 10)
    assert asked < 10
    assert remaining == sorted(remaining, reverse=True)
    for number, (requests, tokens) in enumerate(remaining, 1):
        # What is allowed does not remain: at most one part in 16.
        assert 1_000 - number - 1_000 // 16 <= requests <= 1_000 - number
        assert 10_000 - 10 * number - 10_000 // 16 <= tokens <= 10_000 - 10 * number


async def test_a_report_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    limiter = LocalLimiter("door", clock=clock)
    for _ in range(2):
        await ask(limiter, "ada", Limits(requests_per_minute=1_000), 1)
    clock.now_s += 5.0
    reporting = limiter._reporting
    monkeypatch.setattr(limiter, "_report", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        limiter._report_and_ask()
    assert limiter._reporting not in (None, reporting)
