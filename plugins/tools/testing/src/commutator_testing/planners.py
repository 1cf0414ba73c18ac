"""Conformance suite for planners: subclass, define a factory, run."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.planner import (
    Arrivals,
    EnginePerformance,
    Observation,
    PlannedWorker,
    PlannerConfig,
    PlannerContext,
    PlannerPolicy,
    WorkerPhase,
    length_bucket,
)
from commutator.contract.worker import Role
from commutator.planning import FleetPlanner
from commutator_testing.profile import suite_settings

PERFORMANCE = EnginePerformance(
    prefill_tokens_per_s=8000.0,
    step_s=0.006,
    step_request_s=0.00035,
    max_running=256,
    max_step_tokens=2048,
    kv_tokens=262_144,
)
"""A worker of the engine `sim` with its default options."""
CONTEXT = PlannerContext(performance={Role.BOTH: PERFORMANCE})
"""A fleet of such workers, of whole requests."""

_FLEETS = ((Role.BOTH,), (Role.PREFILL, Role.DECODE))
_INTERVAL_S = 30.0
_DAY = round(86_400 / _INTERVAL_S)
_LEARNS = _DAY // 4

_settings = suite_settings(50)

_ratios = st.none() | st.floats(0, 1)


@st.composite
def _arrivals(draw: st.DrawFn) -> Arrivals:
    number, tokens = draw(st.integers(0, 1000)), draw(st.integers(0, 100_000))
    return Arrivals(
        requests=number,
        prompt_tokens=number * tokens,
        context_tokens=number * tokens,
        prompt_lengths={length_bucket(tokens): number} if number else {},
        gaps_squared_s2=draw(st.floats(0, 100)) if number else 0.0,
    )


@st.composite
def _workers(draw: st.DrawFn, roles: Sequence[Role]) -> list[PlannedWorker]:
    return [
        PlannedWorker(
            worker_id=f"w-{number}",
            role=draw(st.sampled_from(roles)),
            phase=draw(st.sampled_from(list(WorkerPhase))),
            age_s=draw(st.floats(0, 1e6)),
            active_requests=draw(st.integers(0, 300)),
            active_prefill_tokens=draw(st.integers(0, 10**6)),
            held=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]


@st.composite
def observations(draw: st.DrawFn) -> tuple[PlannerContext, list[Observation]]:
    """A fleet, with or without prefill workers, and what a planner may see of it, in order."""
    roles = draw(st.sampled_from(_FLEETS))
    seen: list[Observation] = []
    time_s = draw(st.floats(0, 1e6))
    for _ in range(draw(st.integers(1, 5))):
        window_s = draw(st.floats(0.5, 600)) if seen else 0.0
        time_s += window_s
        known = draw(st.booleans()) or not seen
        seen.append(
            Observation(
                time_s=time_s,
                window_s=window_s,
                arrivals={role: draw(_arrivals()) for role in roles} if known else None,
                workers=draw(_workers(roles)),
                output_tokens=draw(st.none() | st.floats(1, 5000)),
                started_s=draw(st.lists(st.floats(0.1, 1000), max_size=2)),
                given_up=draw(st.dictionaries(st.sampled_from(roles), st.integers(1, 3))),
                waiting_tokens={role: draw(st.integers(0, 10**6)) for role in roles},
                waiting_requests=draw(st.integers(0, 1000)),
                attained_ttft=draw(_ratios),
                attained_itl=draw(_ratios),
            )
        )
    return PlannerContext(performance=dict.fromkeys(roles, PERFORMANCE)), seen


class PlannerContract:
    """What every planner must do. ``make_policy`` returns a fresh policy for a fleet."""

    documented_in = "PlannerPolicy in docs/reference/contract/planner.md"

    def make_policy(self, context: PlannerContext) -> PlannerPolicy[Any]:
        raise NotImplementedError("return a fresh instance of the policy under test")

    @_settings
    @given(observations())
    def test_each_role_gets_a_number_and_a_reason(
        self, history: tuple[PlannerContext, list[Observation]]
    ) -> None:
        context, observed = history
        policy = self.make_policy(context)
        state = policy.begin()
        for seen in observed:
            state, sizing = policy.propose(state, seen)
            assert sizing.roles.keys() == context.performance.keys()
            assert sizing.start_up_s is None or sizing.start_up_s > 0
            for proposal in sizing.roles.values():
                assert isinstance(proposal.workers, int)
                assert proposal.workers >= 0
                assert proposal.reason
                assert "\n" not in proposal.reason

    @_settings
    @given(observations())
    def test_what_was_observed_decides(
        self, history: tuple[PlannerContext, list[Observation]]
    ) -> None:
        """Equal observations get equal answers, and the policy changes nothing that it gets."""
        context, observed = history
        policy = self.make_policy(context)
        state = policy.begin()
        for seen in observed:
            before, text = pickle.dumps(seen), repr(state)
            after, sizing = policy.propose(state, seen)
            assert pickle.dumps(seen) == before
            assert repr(state) == text, "a state must not be changed in place"
            again = self.make_policy(context).propose(state, seen)
            assert (after, sizing) == again
            state = after

    def test_constant_load_gives_a_constant_plan(self) -> None:
        """A day of the same load, from any fleet, ends its changes in the first six hours."""
        for rate, first in ((0, 3), (1, 1), (4, 20), (40, 5)):
            plans = _day(self.make_policy(CONTEXT), rate, first)
            assert len(set(plans[_LEARNS:])) == 1, f"{rate} requests/s, {first} workers"


def _day(policy: PlannerPolicy[Any], rate: int, workers: int) -> list[int]:
    """The workers at each of a day's plans, which are carried out at once."""
    config = PlannerConfig(kind="tested", interval_s=_INTERVAL_S, start_up_s=60.0)
    planner = FleetPlanner(config, [Role.BOTH], policy)
    state, counts = planner.begin(), []
    number = round(rate * _INTERVAL_S)
    arrivals = Arrivals(
        requests=number,
        prompt_tokens=1000 * number,
        context_tokens=1000 * number,
        prompt_lengths={length_bucket(1000): number} if number else {},
        gaps_squared_s2=2 * _INTERVAL_S**2 / number if number else 0.0,
    )
    for tick in range(_DAY):
        active = 5 * rate
        seen = Observation(
            time_s=tick * _INTERVAL_S,
            window_s=_INTERVAL_S if tick else 0.0,
            arrivals={Role.BOTH: arrivals},
            workers=[
                PlannedWorker(
                    worker_id=f"w-{one}",
                    role=Role.BOTH,
                    phase=WorkerPhase.READY,
                    age_s=1000.0,
                    active_requests=active // workers + (one < active % workers),
                )
                for one in range(workers)
            ],
            output_tokens=100.0,
        )
        state, plan = planner.plan(state, seen)
        workers = plan.roles[Role.BOTH].desired
        counts.append(workers)
    return counts
