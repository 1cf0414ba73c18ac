"""Conformance suites for planners, forecasters and constraints: subclass, define a factory, run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commutator.contract.planner import (
    Arrivals,
    Demand,
    EnginePerformance,
    Forecaster,
    Observation,
    PlanConstraint,
    PlannedWorker,
    PlannerConfig,
    PlannerPolicy,
    PlannerTargets,
    Situation,
    WorkerPhase,
    length_bucket,
)
from commutator.contract.worker import Role
from commutator.planner.pipeline import Planner, no_growth
from commutator_testing.profile import examples

__all__ = [
    "ConstraintContract",
    "ForecasterContract",
    "PlannerContract",
    "demands",
    "situations",
]

PERFORMANCE = EnginePerformance(
    prefill_tokens_per_s=8000.0,
    step_s=0.006,
    step_request_s=0.00035,
    max_running=256,
    max_step_tokens=2048,
    kv_tokens=262_144,
)
"""A worker of the engine `sim` with its default options."""

_FLEETS = ((Role.BOTH,), (Role.PREFILL, Role.DECODE))

# One inherited test runs for many plugins.
_settings = settings(
    deadline=None,
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)

_lengths = st.dictionaries(
    st.integers(0, 100_000).map(length_bucket), st.floats(0.001, 1e4), min_size=1, max_size=5
)

demands = st.builds(
    Demand,
    requests_per_s=st.just(0.0) | st.floats(0.001, 500),
    prompt_lengths=_lengths,
    context_tokens=st.floats(0, 100_000),
    output_tokens=st.just(0.0) | st.floats(1, 5000),
    gap_variation=st.floats(0, 20),
    growth=st.floats(0.5, 10),
    backlog_tokens=st.integers(0, 10**7),
    active_requests=st.integers(0, 10_000),
)
"""What a role may have to serve."""


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """What a policy may be told, of a fleet with or without prefill workers."""
    roles = draw(st.sampled_from(_FLEETS))
    return Situation(
        time_s=draw(st.floats(0, 1e9)),
        targets=PlannerTargets(
            ttft_s=draw(st.floats(0.01, 30)),
            itl_s=draw(st.floats(0.001, 1)),
            attainment=draw(st.floats(0.5, 0.999)),
        ),
        lead_s=draw(st.floats(1, 1000)),
        demands={role: draw(demands) for role in roles},
        performance=dict.fromkeys(roles, PERFORMANCE),
        supply={role: draw(st.integers(0, 200)) for role in roles},
    )


class PlannerContract:
    """What every planner must do. ``make_policy`` returns a fresh policy."""

    documented_in = "PlannerPolicy in docs/reference/contract.md"

    def make_policy(self) -> PlannerPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    @_settings
    @given(situations())
    def test_each_role_gets_a_number_and_a_reason(self, situation: Situation) -> None:
        proposals = self.make_policy().propose(situation)
        assert proposals.keys() == situation.demands.keys()
        for proposal in proposals.values():
            assert isinstance(proposal.workers, int)
            assert proposal.workers >= 0
            assert proposal.reason
            assert "\n" not in proposal.reason

    @_settings
    @given(st.lists(situations(), min_size=1, max_size=5))
    def test_the_situation_alone_decides(self, history: list[Situation]) -> None:
        """What was asked before changes nothing, nor does the policy change what it gets."""
        policy, before = self.make_policy(), pickle.dumps(history[-1])
        later = [policy.propose(situation) for situation in history][-1]
        assert later == self.make_policy().propose(history[-1])
        assert pickle.dumps(history[-1]) == before

    def test_constant_load_gives_a_constant_plan(self) -> None:
        """A day of the same load, from any fleet, ends its changes in the first hour."""
        for rate, first in ((0, 3), (1, 1), (4, 20), (40, 5)):
            plans = _day(self.make_policy(), rate, first)
            assert len(set(plans[len(plans) // 24 :])) == 1, f"{rate} requests/s, {first} workers"


def _day(policy: PlannerPolicy, rate: int, workers: int) -> list[int]:
    """The workers at each of a day's plans, which are carried out at once."""
    config = PlannerConfig(kind="tested", interval_s=30.0, start_up_s=60.0)
    planner = Planner(config, {Role.BOTH: PERFORMANCE}, policy, no_growth())
    state, counts = planner.begin(), []
    number = rate * 30
    for tick in range(2880):
        arrivals = Arrivals(
            requests=number,
            prompt_tokens=1000 * number,
            context_tokens=1000 * number,
            prompt_lengths={length_bucket(1000): number},
            gaps_squared_s2=2 * 30**2 / number if number else 0.0,
        )
        seen = Observation(
            time_s=tick * 30.0,
            window_s=30.0 if tick else 0.0,
            arrivals={Role.BOTH: arrivals},
            workers=[
                PlannedWorker(
                    worker_id=f"w-{number}",
                    role=Role.BOTH,
                    phase=WorkerPhase.READY,
                    age_s=1000.0,
                    active_requests=0 if number else 5 * rate,
                )
                for number in range(workers)
            ],
            output_tokens=100.0,
        )
        state, plan = planner.plan(state, seen)
        workers = plan.roles[Role.BOTH].desired
        counts.append(workers)
    return counts


_histories = st.lists(
    st.tuples(st.floats(0.1, 600), st.just(0.0) | st.floats(1e-6, 1e6)), max_size=40
)


class ForecasterContract:
    """What every forecaster must do. ``make_forecaster`` returns a fresh one."""

    documented_in = "Forecaster in docs/reference/contract.md"

    def make_forecaster(self) -> Forecaster[Any]:
        raise NotImplementedError("return a fresh instance of the forecaster under test")

    @_settings
    @given(_histories, st.floats(1, 1000))
    def test_growth_is_a_factor(self, history: list[tuple[float, float]], lead_s: float) -> None:
        growth = self._growth(history, lead_s)
        assert math.isfinite(growth)
        assert growth > 0

    @_settings
    @given(_histories, st.floats(1, 1000))
    def test_equal_histories_give_equal_growth(
        self, history: list[tuple[float, float]], lead_s: float
    ) -> None:
        assert self._growth(history, lead_s) == self._growth(history, lead_s)

    @_settings
    @given(_histories)
    def test_a_state_stays_as_it_was(self, history: list[tuple[float, float]]) -> None:
        forecaster = self.make_forecaster()
        state, time_s = forecaster.begin(), 0.0
        for gap_s, level in history:
            time_s += gap_s
            before, text = state, repr(state)
            state = forecaster.update(before, time_s, level, 60.0)
            assert repr(before) == text

    def test_its_memory_has_a_bound(self) -> None:
        forecaster = self.make_forecaster()
        state, sizes = forecaster.begin(), []
        for tick in range(20_000):
            state = forecaster.update(state, tick * 5.0, 5 + 4 * math.sin(tick / 50), 120.0)
            if tick % 1000 == 0:
                sizes.append(len(pickle.dumps(state)))
        assert max(sizes[10:]) <= 1.5 * max(sizes[:10]) + 1024

    def _growth(self, history: list[tuple[float, float]], lead_s: float) -> float:
        forecaster = self.make_forecaster()
        state, time_s = forecaster.begin(), 0.0
        for gap_s, level in history:
            time_s += gap_s
            state = forecaster.update(state, time_s, level, lead_s)
        return forecaster.growth(state, lead_s)


class ConstraintContract:
    """What every constraint must do. ``make_constraint`` returns a fresh one."""

    documented_in = "PlanConstraint in docs/reference/contract.md"

    def make_constraint(self) -> PlanConstraint:
        raise NotImplementedError("return a fresh instance of the constraint under test")

    @_settings
    @given(situations(), st.data())
    def test_limits_are_of_roles_that_there_are(
        self, situation: Situation, data: st.DataObject
    ) -> None:
        wanted = {role: data.draw(st.integers(0, 1000)) for role in situation.demands}
        before: Mapping[Role, int] = dict(wanted)
        limits = self.make_constraint().limits(wanted, situation)
        assert wanted == before, "a constraint must not change what it gets"
        assert limits.keys() <= wanted.keys()
        for limit in limits.values():
            assert limit.floor >= 0
            assert limit.ceiling is None or limit.ceiling >= 0
            assert limit.reason

    @_settings
    @given(situations(), st.integers(0, 1000))
    def test_equal_questions_get_equal_answers(self, situation: Situation, workers: int) -> None:
        wanted = dict.fromkeys(situation.demands, workers)
        constraint = self.make_constraint()
        first = constraint.limits(wanted, situation)
        assert first == constraint.limits(wanted, situation)
        assert first == self.make_constraint().limits(wanted, situation)
