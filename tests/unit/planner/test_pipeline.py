"""Plans over virtual time: holds, launches that never come, bounds and budgets, missing data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_fleet import FleetModel, arrivals, planner_of, poisson_arrivals

from commutator.contract.planner import (
    Arrivals,
    Observation,
    PlannedWorker,
    PlannerBounds,
    PlannerBudget,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator.planning import ActionKind
from commutator_slo.config import RatioConfig, SloConfig
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.need import Need, NeedOf, Situation


class Wanted:
    """Proposes what a test sets."""

    def __init__(self, **workers: int) -> None:
        self.workers = {Role(name): count for name, count in workers.items()}

    def __call__(self, situation: Situation) -> Mapping[Role, Need]:
        return {role: Need(workers=n, reason="test") for role, n in self.workers.items()}


def planned(policy: NeedOf, workers: int, **options: Any) -> FleetModel:
    start_up_s = options.pop("launches", lambda _: 120.0)
    bounds = PlannerBounds(both=options.pop("both", (1, 64)))
    config = SloConfig(kind="test", bounds=bounds, interval_s=15.0, **options)
    return FleetModel(planner_of(config, policy), workers, start_up_s)


def slo(workers: int = 1, **options: Any) -> FleetModel:
    config = SloConfig(kind="slo", **{"interval_s": 15.0, **options})
    return FleetModel(planner_of(config, growth=Growth(GrowthConfig())), workers)


# ---------------------------------------------------------------------- launches


def test_workers_that_start_count_so_that_none_is_launched_twice() -> None:
    """Vector V12."""
    fleet = planned(Wanted(both=4), workers=2)
    for _ in range(40):
        fleet.tick(arrivals(10, 1000, 15))
    assert fleet.launches == 2
    assert len(fleet.fleet) == 4


def test_a_launch_that_never_comes_is_replaced_and_blocks_nothing() -> None:
    """Vector V12."""
    fleet = planned(
        Wanted(both=4), workers=2, launches=lambda number: None if number < 2 else 120.0
    )
    given_up = 0
    for _ in range(60):
        plan = fleet.tick(arrivals(10, 1000, 15))
        given_up += any("given up" in text for text in plan.warnings)
    assert given_up == 1, "after three times the usual 120 s"
    assert (fleet.launches, fleet.cancelled) == (4, 2)
    assert sum(one.phase is WorkerPhase.READY for one in fleet.fleet.values()) == 4


def test_a_slow_start_is_not_given_up_for_ever() -> None:
    """Each launch that is given up lets the next one take longer."""
    fleet = planned(Wanted(both=2), workers=1, launches=lambda _: 900.0)
    for _ in range(300):
        fleet.tick(arrivals(10, 1000, 15))
    assert len(fleet.fleet) == 2
    assert all(one.phase is WorkerPhase.READY for one in fleet.fleet.values())


def test_a_worker_that_dies_is_replaced_at_once() -> None:
    fleet = planned(Wanted(both=3), workers=3)
    fleet.tick(arrivals(10, 1000, 15))
    del fleet.fleet["first-1"]
    plan = fleet.tick(arrivals(10, 1000, 15))
    assert [action.kind for action in plan.actions] == [ActionKind.LAUNCH]


def worker(name: str, phase: WorkerPhase, age_s: float = 100.0, **more: Any) -> PlannedWorker:
    return PlannedWorker(worker_id=name, role=Role.BOTH, phase=phase, age_s=age_s, **more)


def first_actions(policy: NeedOf, workers: Sequence[PlannedWorker]) -> list[tuple[str, Any]]:
    config = SloConfig(kind="test", hold_s=0.0, start_up_s=30.0)
    planner = planner_of(config, policy)
    state = planner.begin()
    for time_s in (0.0, 5.0, 100.0):
        seen = Observation(
            time_s=time_s, window_s=5.0 if time_s else 0.0, arrivals={}, workers=workers
        )
        state, plan = planner.plan(state, seen)
    return [(action.kind.value, action.worker_id) for action in plan.actions]


def two_roles(prefill: int, decode: int, workers: Sequence[PlannedWorker]) -> list[Any]:
    """What a plan that wants so many does: action, worker, role that it has afterwards."""
    config = SloConfig(kind="test", hold_s=0.0, start_up_s=30.0)
    policy = Wanted(prefill=prefill, decode=decode)
    planner = planner_of(config, policy, roles=(Role.PREFILL, Role.DECODE))
    state = planner.begin()
    for time_s in (0.0, 5.0, 100.0):
        seen = Observation(
            time_s=time_s, window_s=5.0 if time_s else 0.0, arrivals={}, workers=workers
        )
        state, plan = planner.plan(state, seen)
    return [(one.kind.value, one.worker_id, one.role.value) for one in plan.actions]


def of_role(role: Role, *others: Role, **requests: int) -> list[PlannedWorker]:
    return [
        evolve(
            worker(name, WorkerPhase.READY, active_requests=active), role=role, may_become=others
        )
        for name, active in requests.items()
    ]


def test_a_worker_that_one_role_spares_and_another_needs_changes_its_role() -> None:
    workers = [
        *of_role(Role.PREFILL, Role.DECODE, p0=1),
        *of_role(Role.DECODE, Role.PREFILL, d0=9, d1=2, d2=5),
    ]
    assert two_roles(1, 3, workers) == []
    assert two_roles(2, 2, workers) == [("set_role", "d1", "prefill")], "the least busy one"
    assert two_roles(3, 2, workers) == [("set_role", "d1", "prefill"), ("launch", None, "prefill")]
    assert two_roles(2, 1, workers) == [("set_role", "d1", "prefill"), ("drain", "d2", "decode")]


def test_a_worker_that_cannot_change_its_role_is_drained_and_another_launched() -> None:
    workers = [*of_role(Role.PREFILL, p0=1), *of_role(Role.DECODE, d0=9, d1=2)]
    assert two_roles(2, 1, workers) == [("launch", None, "prefill"), ("drain", "d1", "decode")]
    held = [workers[0], *(evolve(one, may_become=[Role.PREFILL]) for one in workers[1:])]
    held[1:] = [evolve(one, held=True) for one in held[1:]]
    assert two_roles(2, 1, held) == [("launch", None, "prefill")]


def test_a_draining_worker_comes_back_before_another_changes_its_role() -> None:
    back = evolve(worker("p1", WorkerPhase.DRAINING), role=Role.PREFILL)
    workers = [
        back,
        *of_role(Role.PREFILL, Role.DECODE, p0=1),
        *of_role(Role.DECODE, Role.PREFILL, d0=1, d1=0),
    ]
    assert two_roles(2, 1, workers) == [("undrain", "p1", "prefill"), ("drain", "d1", "decode")]


def test_a_worker_that_is_changing_its_role_counts_for_the_new_one() -> None:
    """Else the next plan would change another."""
    changing = evolve(worker("d1", WorkerPhase.STARTING, 0.0), role=Role.PREFILL)
    workers = [
        changing,
        *of_role(Role.PREFILL, Role.DECODE, p0=1),
        *of_role(Role.DECODE, Role.PREFILL, d0=1),
    ]
    assert two_roles(2, 1, workers) == []
    assert two_roles(1, 1, workers) == [("cancel", "d1", "prefill")]


def test_draining_workers_are_used_again_before_others_are_launched() -> None:
    workers = [
        worker("ready", WorkerPhase.READY),
        worker("empty", WorkerPhase.DRAINING),
        worker("busy", WorkerPhase.DRAINING, active_requests=5),
    ]
    assert first_actions(Wanted(both=2), workers) == [("undrain", "busy")]
    assert first_actions(Wanted(both=4), workers) == [
        ("undrain", "busy"),
        ("undrain", "empty"),
        ("launch", None),
    ]


def test_launches_are_cancelled_before_workers_are_drained_and_the_emptiest_goes_first() -> None:
    workers = [
        worker("cold", WorkerPhase.READY, active_requests=2, cached_blocks=10),
        worker("warm", WorkerPhase.READY, active_requests=2, cached_blocks=90),
        worker("busy", WorkerPhase.READY, active_requests=7),
        worker("older", WorkerPhase.STARTING, 20.0),
        worker("younger", WorkerPhase.STARTING, 10.0),
    ]
    assert first_actions(Wanted(both=4), workers) == [("cancel", "younger")]
    assert first_actions(Wanted(both=2), workers) == [
        ("cancel", "younger"),
        ("cancel", "older"),
        ("drain", "cold"),
    ]


# ------------------------------------------------------------------------- holds


def test_the_fleet_grows_at_once_and_shrinks_after_the_hold() -> None:
    policy = Wanted(both=2)
    fleet = planned(policy, workers=2, hold_s=300.0)
    for _ in range(40):
        fleet.tick(arrivals(10, 1000, 15))
    policy.workers[Role.BOTH] = 6
    assert fleet.tick(arrivals(10, 1000, 15)).roles[Role.BOTH].desired == 6
    policy.workers[Role.BOTH] = 3
    for _ in range(20):
        fleet.tick(arrivals(10, 1000, 15))
    held = fleet.desired()[-20:]
    assert held == [6] * 19 + [3], "300 s are 20 plans"
    assert "needed in the last 300 s" in fleet.plans[-2].roles[Role.BOTH].reason


def test_a_planner_that_has_just_begun_does_not_shrink_the_fleet() -> None:
    fleet = planned(Wanted(both=1), workers=9, hold_s=300.0)
    for _ in range(21):
        fleet.tick(arrivals(0, 1000, 15))
    assert fleet.desired() == [9] * 20 + [1]


def test_changes_of_direction_have_a_budget_and_growing_never_waits_for_it() -> None:
    policy = Wanted(both=1)
    times = {"hold_s": 0.0, "start_up_s": 15.0, "launches": lambda _: 15.0}
    fleet = planned(policy, workers=1, max_flips_per_hour=6, **times)
    for tick in range(960):
        policy.workers[Role.BOTH] = 5 if tick % 8 < 4 else 1
        plan = fleet.tick(arrivals(10, 1000, 15))
        assert plan.roles[Role.BOTH].desired >= policy.workers[Role.BOTH]
    desired = fleet.desired()
    turns = [tick for tick, (a, b) in enumerate(pairwise(desired)) if a != b][1:]
    assert len(turns) > 12, "it does shrink, within four hours"
    for first in turns:
        assert sum(first <= turn < first + 240 for turn in turns) <= 6


@pytest.mark.parametrize("rate", [1, 40])
@pytest.mark.parametrize("workers", [1, 7, 30])
def test_constant_load_gives_a_constant_plan_for_a_day(rate: int, workers: int) -> None:
    fleet = slo(workers, interval_s=30.0)
    for _ in range(24 * 120):
        fleet.tick(arrivals(30 * rate, 1155, 30))
    desired = fleet.desired()
    assert len(set(desired[6 * 120 :])) == 1, "once constant load is no longer a surprise"
    later = [after - before for before, after in pairwise(desired[20:])]
    assert all(change <= 0 for change in later), "it only shrinks, as the growth assumed shrinks"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(("rate_per_s", "workers"), [(0.5, 1), (2.0, 40), (30.0, 3)])
def test_poisson_load_is_constant_load_for_a_day(
    rate_per_s: float, workers: int, seed: int
) -> None:
    """Chance is not demand: once an hour has been seen, the plan never turns, and hardly moves."""
    rng = random.Random(seed)
    fleet = slo(workers, bounds=PlannerBounds(both=(1, 500)))
    for _ in range(24 * 240):
        fleet.tick(poisson_arrivals(rng, rate_per_s, 1155, 15))
    settled = fleet.desired()[240:]
    changes = [after - before for before, after in pairwise(settled) if before != after]
    turns = sum((one > 0) is not (other > 0) for one, other in pairwise(changes))
    assert turns == 0
    assert len(set(settled[11 * 240 :])) == 1, "not at all in the second half of the day"


def test_equal_seeds_give_equal_plans() -> None:
    def run(seed: int) -> list[Any]:
        rng, fleet = random.Random(seed), slo(3)
        for _ in range(200):
            fleet.tick(poisson_arrivals(rng, 8.0, 1155, 15))
        return fleet.plans

    assert run(5) == run(5)
    assert run(5) != run(6)


# ----------------------------------------------------------------- bounds, budget


@settings(deadline=None, max_examples=100)
@given(
    wanted=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=12),
    bounds=st.tuples(
        st.integers(0, 20), st.integers(0, 20), st.integers(1, 20), st.integers(0, 20)
    ),
    budget=st.none() | st.integers(40, 100),
    least=st.floats(0, 10),
    most=st.none() | st.floats(10, 100),
)
def test_no_plan_leaves_bounds_and_budget(
    wanted: list[tuple[int, int]],
    bounds: tuple[int, int, int, int],
    budget: int | None,
    least: float,
    most: float | None,
) -> None:
    prefill, decode = (bounds[0], bounds[0] + bounds[1]), (bounds[2], bounds[2] + bounds[3])
    config = SloConfig(
        kind="test",
        bounds=PlannerBounds(prefill=prefill, decode=decode),
        budget=PlannerBudget(workers=budget),
        constraints=(RatioConfig(least=least, most=most),),
        hold_s=20.0,
        start_up_s=5.0,
    )
    policy = Wanted(prefill=0, decode=0)
    roles = (Role.PREFILL, Role.DECODE)
    planner = planner_of(config, policy, roles=roles)
    state = planner.begin()
    for tick, (p, d) in enumerate(wanted):
        policy.workers = {Role.PREFILL: p, Role.DECODE: d}
        seen = Observation(
            time_s=5.0 * tick, window_s=5.0 if tick else 0.0, arrivals={}, workers=[]
        )
        state, plan = planner.plan(state, seen)
        counts = {role: one.desired for role, one in plan.roles.items()}
        assert prefill[0] <= counts[Role.PREFILL] <= prefill[1]
        assert decode[0] <= counts[Role.DECODE] <= decode[1]
        assert budget is None or sum(counts.values()) <= budget


def test_a_budget_cuts_roles_in_proportion_and_says_so() -> None:
    config = SloConfig(kind="test", budget=PlannerBudget(workers=6))
    roles = (Role.PREFILL, Role.DECODE)
    planner = planner_of(config, Wanted(prefill=8, decode=4), roles=roles)
    seen = Observation(time_s=0.0, window_s=0.0, arrivals={}, workers=[])
    _, plan = planner.plan(planner.begin(), seen)
    assert {role: one.desired for role, one in plan.roles.items()} == {
        Role.PREFILL: 4,
        Role.DECODE: 2,
    }
    assert plan.roles[Role.PREFILL].reason == "need 8 (test); 4 by the budget of 6 workers"


def test_prefill_follows_decode() -> None:
    ratio = RatioConfig(least=0.5, most=2.0)
    assert [ratio.limited(prefill, 3) for prefill in (0, 2, 5, 9)] == [2, 2, 5, 6]
    config = SloConfig(kind="test", constraints=(ratio, RatioConfig(most=1.0)))
    roles = (Role.PREFILL, Role.DECODE)
    planner = planner_of(config, Wanted(prefill=9, decode=3), roles=roles)
    seen = Observation(time_s=0.0, window_s=0.0, arrivals={}, workers=[])
    _, plan = planner.plan(planner.begin(), seen)
    assert plan.roles[Role.PREFILL].desired == 3
    ratio_to = "by the ratio to 3 decode workers"
    assert plan.roles[Role.PREFILL].reason == f"need 9 (test); 6 {ratio_to}; 3 {ratio_to}"
    whole = planner_of(config, Wanted(both=9))
    assert whole.plan(whole.begin(), seen)[1].roles[Role.BOTH].desired == 9


# ------------------------------------------------------------------ idle, unknown


def test_an_idle_role_is_stopped_after_a_cold_start_s_worth_of_idling() -> None:
    """Vector V13, ski rental: 120 s of start-up and 300 s of penalty make 420 s of waiting."""
    fleet = planned(Wanted(both=0), workers=1, both=(0, 4), start_up_s=120.0, idle_penalty_s=300.0)
    for _ in range(40):
        fleet.tick(arrivals(5, 100, 15))
    last_s = fleet.now_s
    while fleet.desired()[-1]:
        fleet.tick(arrivals(0, 100, 15))
    assert fleet.now_s - last_s == 420
    assert fleet.tick(arrivals(1, 100, 15)).roles[Role.BOTH].desired == 1


@pytest.mark.parametrize("pause_s", [60, 300, 405, 420, 600, 6000])
def test_waiting_so_long_costs_at_most_twice_the_best_in_hindsight(pause_s: int) -> None:
    """Vector V13."""
    fleet = planned(Wanted(both=0), workers=1, both=(0, 4), start_up_s=120.0, idle_penalty_s=300.0)
    for _ in range(40):
        fleet.tick(arrivals(5, 100, 15))
    cost_s = 0
    for _ in range(pause_s // 15):
        cost_s += 15 * fleet.tick(arrivals(0, 100, 15)).roles[Role.BOTH].desired
    stopped = fleet.desired()[-1] == 0
    assert cost_s + 420 * stopped <= 2 * min(pause_s, 420) + 15


def test_without_metrics_the_last_plan_stays() -> None:
    fleet = slo(2)
    for _ in range(60):
        fleet.tick(arrivals(15 * 20, 1155, 15))
    before = fleet.desired()[-1]
    assert before > 2
    for _ in range(120):
        plan = fleet.tick(None)
        assert plan.roles[Role.BOTH].desired == before
        assert plan.warnings == ["arrivals or workers are not known: the last plan stays"]
        assert not plan.actions


def test_without_metrics_a_worker_that_dies_is_still_replaced() -> None:
    fleet = planned(Wanted(both=3), workers=3)
    fleet.tick(arrivals(10, 1000, 15))
    del fleet.fleet["first-1"]
    assert [action.kind for action in fleet.tick(None).actions] == [ActionKind.LAUNCH]


def test_a_policy_that_raises_keeps_the_last_plan() -> None:
    class Fails(Wanted):
        asked = 0

        def __call__(self, situation: Situation) -> Mapping[Role, Need]:
            self.asked += 1
            if self.asked > 6:
                raise ZeroDivisionError("no traffic")
            return super().__call__(situation)

    fleet = planned(Fails(both=5), workers=2)
    for _ in range(10):
        plan = fleet.tick(arrivals(0, 1000, 15))
    assert plan.roles[Role.BOTH].desired == 5
    assert "the policy failed, the last plan stays: ZeroDivisionError" in plan.warnings[0]


def test_start_up_times_are_learned() -> None:
    lead_s: list[float] = []

    class Watching(Wanted):
        def __call__(self, situation: Situation) -> Mapping[Role, Need]:
            lead_s.append(situation.lead_s)
            return super().__call__(situation)

    policy = Watching(both=3)
    fleet = planned(policy, workers=1, launches=lambda _: 45.0)
    for _ in range(10):
        fleet.tick(arrivals(5, 1000, 15))
    assert lead_s[0] == 120 + 15
    assert lead_s[-1] == 45 + 15


def test_burstier_gaps_are_seen() -> None:
    seen: list[float] = []

    class Watching(Wanted):
        def __call__(self, situation: Situation) -> Mapping[Role, Need]:
            seen.append(situation.demands[Role.BOTH].gap_variation)
            return super().__call__(situation)

    rng, fleet = random.Random(3), planned(Watching(both=1), workers=1)
    for _ in range(400):
        fleet.tick(poisson_arrivals(rng, 5.0, 1000, 15))
    assert seen[-1] == pytest.approx(1.0, abs=0.15)
    for _ in range(1600):
        even = arrivals(75, 1000, 15)
        fleet.tick(evolve(even, gaps_squared_s2=even.gaps_squared_s2 * 4))
    assert seen[-1] == pytest.approx(3.0, abs=0.05)


def test_an_arrival_counts_whether_or_not_it_was_served() -> None:
    """A fleet of one that cannot keep up is given what the demand needs, in one step."""
    fleet = slo(1)
    for _ in range(6):
        fleet.tick(arrivals(15 * 20, 1155, 15) if fleet.plans else Arrivals())
    assert fleet.desired()[1] >= 5
