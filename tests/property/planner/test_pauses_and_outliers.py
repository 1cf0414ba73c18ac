"""Bursts that come back, and single prompts of any length: what they must not make of a fleet."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_fleet import FleetModel, arrivals, planner_of

from commutator.contract.planner import Arrivals, PlannerBounds, PlannerTargets, length_bucket
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.returns import Returns, spared

INTERVAL_S = 15.0
some = settings(deadline=None, max_examples=20)


def fleet(workers: int, **options: float) -> FleetModel:
    config = SloConfig(
        kind="slo",
        interval_s=INTERVAL_S,
        targets=PlannerTargets(attainment=0.95),
        bounds=PlannerBounds(both=(1, 64)),
        start_up_s=120.0,
        **options,  # type: ignore[arg-type]
    )
    return FleetModel(planner_of(config, growth=Growth(GrowthConfig())), workers)


def with_outlier(usual: Arrivals, tokens: int) -> Arrivals:
    return evolve(
        usual,
        requests=usual.requests + 1,
        prompt_tokens=usual.prompt_tokens + tokens,
        context_tokens=usual.context_tokens + tokens,
        prompt_lengths={**usual.prompt_lengths, length_bucket(tokens): 1},
    )


@some
@given(
    rate=st.integers(1, 120),
    tokens=st.integers(20_000, 2_000_000),
    number=st.integers(1, 3),
    apart=st.integers(1, 20),
)
def test_a_few_prompts_of_any_length_change_hardly_anything(
    rate: int, tokens: int, number: int, apart: int
) -> None:
    """A worker computes 4,000 tokens within the target; each of these takes five times that."""
    usual = arrivals(rate, 1000, INTERVAL_S)
    model = fleet(2)
    for _ in range(100):
        model.tick(usual, attained=1.0)
    before = model.desired()[-1]
    warned = 0
    for tick in range(60):
        outlier = tick % apart == 0 and tick < number * apart
        plan = model.tick(with_outlier(usual, tokens) if outlier else usual, attained=1.0)
        warned += any("none is started for it" in text for text in plan.warnings)
    assert max(model.desired()[-60:]) <= before + 1
    assert warned == number


@some
@given(
    rate=st.integers(40, 300),
    burst=st.integers(8, 40),
    pause=st.integers(8, 100),
)
def test_a_fleet_that_could_not_grow_again_in_time_stays_through_pauses(
    rate: int, burst: int, pause: int
) -> None:
    """At 95 %, a burst of up to ten minutes does not pay for a start of two."""
    model = fleet(8)
    usual, nothing = arrivals(rate, 1000, INTERVAL_S), arrivals(0, 1000, INTERVAL_S)
    for _ in range(burst):
        model.tick(usual, attained=0.95)
    needed = max(plan.roles[Role.BOTH].proposed or 0 for plan in model.plans[-4:])
    for _ in range(pause):
        plan = model.tick(nothing)
        assert plan.roles[Role.BOTH].desired >= min(needed, 8) * 0.6


@some
@given(hold_s=st.sampled_from([0.0, 600.0, 1800.0]), rate=st.integers(100, 300))
def test_the_longest_hold_ends(hold_s: float, rate: int) -> None:
    model = fleet(8, longest_hold_s=hold_s)
    usual, nothing = arrivals(rate, 1000, INTERVAL_S), arrivals(0, 1000, INTERVAL_S)
    for _ in range(20):
        model.tick(usual, attained=0.95)
    for _ in range(round((max(hold_s, 180.0) + 300) / INTERVAL_S)):
        model.tick(nothing)
    assert model.desired()[-1] == 1


@some
@given(period=st.integers(20, 90), spare=st.floats(1e3, 1e6))
def test_pauses_that_came_before_are_held_through(period: int, spare: float) -> None:
    """Whatever may be late: the second pause of a kind is known."""
    state = Returns()
    time_s = 0.0
    for cycle in range(3):
        for tick in range(2 * period):
            busy = tick < period
            time_s += INTERVAL_S
            state = state.after(time_s, 6 if busy else 0, 6.0 if busy else 0.0, 180.0, 3600.0)
            why = state.held(1, 125.0, spare)
            assert (why is not None) == (cycle > 0 and not busy)


@some
@given(
    st.lists(st.tuples(st.integers(0, 500), st.none() | st.floats(0, 1)), max_size=50),
    st.integers(0, 49),
)
def test_more_misses_never_leave_more_to_spare(
    windows: list[tuple[int, float | None]], where: int
) -> None:
    def left(worse: int | None) -> float:
        spare: float | None = 0.0
        for number, (requests, missed) in enumerate(windows):
            part = 1.0 if number == worse else missed
            spare = spared(spare, requests, part, 0.05, INTERVAL_S)
        assert spare is not None
        return spare

    assert left(where) <= left(None) + 1e-9
