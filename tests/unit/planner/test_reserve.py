"""The reserve: fleets are made for what is asked, no more, by what was attained."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_fleet import FleetModel, arrivals, planner_of, poisson_arrivals

from commutator.contract.planner import Observation, PlannerTargets, WorkerPhase
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.need import needs
from commutator_slo.pipeline import Pipeline, PipelineState

some = settings(deadline=None, max_examples=25)


def fleet(
    attainment: float = 0.95,
    workers: int = 4,
    *,
    adapt: bool = True,
    start_up_s: float = 30.0,
    **options: bool,
) -> FleetModel:
    config = SloConfig(
        kind="slo",
        interval_s=15.0,
        targets=PlannerTargets(attainment=attainment),
        adapt=adapt,
        start_up_s=start_up_s,
        **options,  # type: ignore[arg-type]
    )
    return FleetModel(planner_of(config, growth=Growth(GrowthConfig())), workers)


def state_of(model: FleetModel) -> PipelineState:
    return model._state.policy


def pipeline_of(model: FleetModel) -> Pipeline:
    policy = model.planner._policy
    assert isinstance(policy, Pipeline)
    return policy


def after(
    attained: Sequence[float], attainment: float = 0.95, start_up_s: float = 30.0
) -> PipelineState:
    """The state after these windows, with a steady load."""
    model = fleet(attainment, start_up_s=start_up_s)
    for one in attained:
        model.tick(arrivals(60, 1155, 15), attained=one)
    return state_of(model)


def test_while_more_is_attained_than_asked_the_reserve_goes_in_half_an_hour() -> None:
    assert after([1.0] * 61).reserve == pytest.approx(0.5, abs=0.05)
    assert after([1.0] * 121).reserve == pytest.approx(0.0, abs=0.05)
    assert after([1.0] * 61, attainment=0.99).reserve == pytest.approx(0.5, abs=0.05)


def test_where_workers_start_slowly_the_reserve_moves_as_slowly() -> None:
    """With 285 s and plans each 15 s, what one did is known after five minutes."""
    assert after([1.0] * 121, start_up_s=285.0).reserve == pytest.approx(0.7, abs=0.03)


def test_a_minute_of_misses_undoes_what_nineteen_without_did() -> None:
    assert after([1.0] * 77).reserve == pytest.approx(0.37, abs=0.03)
    assert after([*[1.0] * 77, *[0.0] * 4]).reserve == pytest.approx(1.0, abs=0.03)


def test_as_much_as_asked_changes_nothing() -> None:
    assert after([0.95] * 200).reserve == pytest.approx(1.0)


@some
@given(st.lists(st.floats(0, 1), min_size=2, max_size=60), st.floats(0, 1), st.integers(0, 59))
def test_fewer_in_time_never_leave_a_smaller_reserve(
    attained: list[float], worse: float, where: int
) -> None:
    lower = list(attained)
    lower[where % len(lower)] *= worse
    assert after(lower).reserve >= after(attained).reserve - 1e-9


@some
@given(st.lists(st.floats(0, 1), max_size=120), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_reserve_is_bounded(attained: list[float], attainment: float) -> None:
    assert -1 <= after(attained, attainment).reserve <= 2


@some
@given(st.floats(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_more_reserve_never_sizes_for_less(growth: float, low: float, more: float) -> None:
    planner = pipeline_of(fleet())
    state = planner.begin()

    def sized_for(reserve: float) -> float:
        return planner._reserved(evolve(state, reserve=reserve), growth)

    assert sized_for(low + more) >= sized_for(low) >= 1, "of the demand as it is, no less"
    assert sized_for(-more) <= 1
    assert sized_for(-1) == pytest.approx(0.741, abs=0.001), "and never by a third less"


def test_without_evidence_the_fleet_is_never_below_what_the_formulas_need() -> None:
    """Only after an hour in which more than asked were in time, with no reserve left."""
    model, chance = fleet(), random.Random(3)
    for _ in range(118):
        plan = model.tick(poisson_arrivals(chance, 6.0, 1155, 15), attained=1.0)
    bare = pipeline_of(model)
    situation = bare._situation(state_of(model), model_seen(model), 120.0)
    need = needs(situation)[Role.BOTH].workers
    assert plan.roles[Role.BOTH].desired >= need


def model_seen(model: FleetModel) -> Observation:
    return Observation(
        time_s=model.now_s, window_s=15.0, arrivals={}, workers=list(model.fleet.values())
    )


def ready(model: FleetModel) -> int:
    return sum(one.phase is WorkerPhase.READY for one in model.fleet.values())


def served(model: FleetModel, enough: int, hours: float, rate: Callable[[int], float]) -> list[int]:
    """Steady Poisson load of which all is in time with ``enough`` workers, and half with fewer."""
    chance = random.Random(9)
    for tick in range(round(hours * 240)):
        attained = 1.0 if ready(model) >= enough else 0.5
        model.tick(poisson_arrivals(chance, rate(tick), 1155, 15), attained=attained)
    return model.desired()


def test_at_a_cliff_the_fleet_turns_once_an_hour_at_most() -> None:
    """Steady load that needs more workers than the formulas say: no flapping around it."""
    desired = served(fleet(), 5, 8.0, lambda _: 12.0)
    changes = [after - before for before, after in pairwise(desired) if before != after]
    turns = sum((one > 0) is not (other > 0) for one, other in pairwise(changes))
    assert turns <= 8, "one an hour"
    plain = served(fleet(adapt=False), 5, 8.0, lambda _: 12.0)
    assert sum(desired) > sum(plain), "more than without what was attained"


def test_where_requests_are_in_time_with_fewer_the_fleet_becomes_smaller() -> None:
    plain = served(fleet(adapt=False), 1, 4.0, lambda tick: 12.0 + 6.0 * (tick // 40 % 2))
    adapted = served(fleet(), 1, 4.0, lambda tick: 12.0 + 6.0 * (tick // 40 % 2))
    assert sum(adapted) < 0.9 * sum(plain)


def test_a_plan_says_how_much_of_the_growth_it_counts() -> None:
    model = fleet()
    for _ in range(61):
        plan = model.tick(arrivals(60, 1155, 15), attained=1.0)
    assert "reserve 50%" in plan.roles[Role.BOTH].reason
    assert "reserve" not in fleet().tick(arrivals(60, 1155, 15)).roles[Role.BOTH].reason
