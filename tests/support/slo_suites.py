"""What every forecaster, and every constraint of plans, of the planner `slo` must do."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.planner import PlannerTargets, length_bucket
from commutator.contract.worker import Role
from commutator_slo.situation import Demand, Forecaster, PlanConstraint, Situation
from commutator_testing.planners import PERFORMANCE
from commutator_testing.profile import suite_settings

__all__ = ["ConstraintContract", "ForecasterContract", "demands", "situations"]

_FLEETS = ((Role.BOTH,), (Role.PREFILL, Role.DECODE))
_settings = suite_settings(50)

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


_histories = st.lists(
    st.tuples(st.floats(0.1, 600), st.just(0.0) | st.floats(1e-6, 1e6)), max_size=40
)


class ForecasterContract:
    """What every forecaster must do. ``make_forecaster`` returns a fresh one."""

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
