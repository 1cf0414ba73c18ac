"""What a front door decides about a principal's limits before it asks the ledger."""

from __future__ import annotations

import pytest

from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError
from commutator.tenants.ledger import Moment, Refusal, Standing
from commutator.tenants.limiter import LocalLimiter
from commutator.tenants.meter import Meter, MeteredRequest

ADA = Principal(name="ada", limits=Limits(concurrent_requests=2))


def begun(meter: Meter, principal: Principal = ADA) -> MeteredRequest:
    metered = meter.begin(principal)
    assert metered is not None
    return metered


def test_requests_in_hand_are_as_many_as_may_run_also_before_they_are_admitted() -> None:
    meter = Meter()
    first, second = begun(meter), begun(meter)
    with pytest.raises(RateLimitError, match="at the same time"):
        meter.begin(ADA)
    first.end()
    third = begun(meter)
    with pytest.raises(RateLimitError, match="at the same time"):
        meter.begin(ADA)
    second.end()
    third.end()
    assert not meter.in_hand


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
    metered = Meter().begin(Principal(name="bob", limits=limits))
    assert (metered is not None) == counts


@pytest.mark.parametrize(("retry_after_s", "refused_s"), [(0.25, 0.25), (40.0, 1.0)])
def test_a_refusal_is_remembered_for_a_second_but_no_longer_than_it_holds(
    retry_after_s: float, refused_s: float
) -> None:
    now_s = 100.0
    meter = Meter(clock=lambda: now_s)
    meter.refused(ADA, Refusal("requests_per_minute", retry_after_s, Standing()))
    now_s += refused_s - 0.01
    with pytest.raises(RateLimitError):
        meter.begin(ADA)
    now_s += 0.01
    begun(meter).end()


def test_what_may_fit_at_once_is_not_remembered() -> None:
    meter = Meter()
    meter.refused(ADA, Refusal("tokens_per_minute", 30.0, Standing()))
    begun(meter).end()


@pytest.mark.security
def test_refused_principals_are_remembered_in_bounded_memory() -> None:
    meter = Meter()
    for number in range(25_000):
        one = Principal(name=f"p{number}", limits=Limits(requests_per_minute=1))
        meter.refused(one, Refusal("requests_per_minute", 40.0, Standing()))
        assert len(meter._refused) <= 10_000


async def test_a_request_is_settled_with_what_it_took() -> None:
    limiter = LocalLimiter("door")
    meter = Meter(limiter)
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=100, concurrent_requests=1))

    for took in (None, 30):
        metered = begun(meter, ada)
        await metered.admit(10, max_tokens=50)
        metered.tokens = took
        metered.end()
    metered = begun(meter, ada)
    await metered.admit(10, max_tokens=60)
    assert metered.standing is not None
    assert metered.standing.remaining_tokens == 0


@pytest.mark.parametrize("took", [None, 0, 30, 60, 75])
async def test_a_request_counts_as_what_it_took_be_that_less_or_more(took: int | None) -> None:
    meter = Meter(LocalLimiter("door"))
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=100))
    metered = begun(meter, ada)
    await metered.admit(10, max_tokens=50)
    metered.tokens = took
    metered.end()
    metered = begun(meter, ada)
    await metered.admit(1, max_tokens=4)
    assert metered.standing is not None
    assert metered.standing.remaining_tokens == 100 - (took or 0) - 5


async def test_requests_that_are_charged_ahead_wait_for_nothing_and_are_told_what_is_left() -> None:
    now = Moment(100.25, 100.25)
    meter = Meter(LocalLimiter("door", clock=lambda: now))
    ada = Principal(name="ada", limits=Limits(requests_per_minute=1_000, tokens_per_minute=10_000))
    remaining: list[tuple[int, int]] = []
    ahead = 0
    for _ in range(50):
        metered = begun(meter, ada)
        await metered.admit(1, 1, 9)
        standing, ticket = metered.standing, metered._ticket
        assert standing is not None
        assert ticket is not None
        assert standing.remaining_requests is not None
        assert standing.remaining_tokens is not None
        ahead += ticket.ahead > 0
        remaining.append((standing.remaining_requests, standing.remaining_tokens))
        metered.tokens = 10
        metered.end()
    assert ahead > 20
    assert remaining == sorted(remaining, reverse=True)
    for number, (requests, tokens) in enumerate(remaining, 1):
        # What is charged ahead does not remain: at most one part in 16.
        assert 1_000 - number - 1_000 // 16 <= requests <= 1_000 - number
        assert 10_000 - 11 * number - 10_000 // 16 <= tokens <= 10_000 - 10 * number
