"""What a front door decides about a principal's limits before it asks the ledger."""

from __future__ import annotations

import pytest

from commutator.contract.principal import Limits, Principal
from commutator.errors import RateLimitError
from commutator.tenants.ledger import Refusal, Standing
from commutator.tenants.limiter import LocalLimiter
from commutator.tenants.meter import Meter

ADA = Principal(name="ada", limits=Limits(concurrent_requests=2))


def test_requests_in_hand_are_as_many_as_may_run_also_before_they_are_admitted() -> None:
    meter = Meter()
    third = pytest.raises(RateLimitError, match="at the same time")
    with meter.request(ADA), meter.request(ADA), third, meter.request(ADA):
        pass
    with meter.request(ADA), meter.request(ADA):
        pass


@pytest.mark.parametrize(("retry_after_s", "refused_s"), [(0.25, 0.25), (40.0, 1.0)])
def test_a_refusal_is_remembered_for_a_second_but_no_longer_than_it_holds(
    retry_after_s: float, refused_s: float
) -> None:
    now_s = 100.0
    meter = Meter(clock=lambda: now_s)
    meter.refused(ADA, Refusal("requests_per_minute", retry_after_s, Standing()))
    now_s += refused_s - 0.01
    with pytest.raises(RateLimitError), meter.request(ADA):
        pass
    now_s += 0.01
    with meter.request(ADA):
        pass


def test_what_may_fit_at_once_is_not_remembered() -> None:
    meter = Meter()
    meter.refused(ADA, Refusal("tokens_per_minute", 30.0, Standing()))
    with meter.request(ADA):
        pass


@pytest.mark.security
def test_refused_principals_are_remembered_in_bounded_memory() -> None:
    meter = Meter()
    for number in range(25_000):
        one = Principal(name=f"p{number}", limits=Limits(requests_per_minute=1))
        meter.refused(one, Refusal("requests_per_minute", 40.0, Standing()))
        assert len(meter._refused) <= 10_000


async def test_a_request_that_fails_is_settled_with_what_it_took() -> None:
    limiter = LocalLimiter("door")
    meter = Meter(limiter)
    ada = Principal(name="ada", limits=Limits(tokens_per_minute=100, concurrent_requests=1))

    async def failing(took: int | None) -> None:
        with meter.request(ada) as metered:
            await metered.admit(10, max_tokens=50)
            if took is not None:
                metered.took(took)
            raise ConnectionError

    for took in (None, 30):
        with pytest.raises(ConnectionError):
            await failing(took)
    with meter.request(ada) as metered:
        await metered.admit(10, max_tokens=60)
        assert metered.standing is not None
        assert metered.standing.remaining_tokens == 0
