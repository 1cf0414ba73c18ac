"""The shipped suite, and the published formula."""

from __future__ import annotations

import pytest

from commutator.contract.planner import Demand, PlannerPolicy, PlannerTargets, Situation
from commutator.contract.worker import Role
from commutator_hpa import Hpa, HpaConfig
from commutator_testing.planners import PERFORMANCE, PlannerContract


class TestHpa(PlannerContract):
    def make_policy(self) -> PlannerPolicy:
        return Hpa(HpaConfig(kind="hpa"))

    @pytest.mark.parametrize(("average", "workers"), [(90, 6), (64, 4), (30, 2)])
    def test_workers_follow_the_average_load(self, average: int, workers: int) -> None:
        demand = Demand(
            requests_per_s=1.0,
            prompt_lengths={1: 1.0},
            context_tokens=1.0,
            output_tokens=1.0,
            gap_variation=1.0,
            growth=1.0,
            backlog_tokens=0,
            active_requests=4 * average,
        )
        situation = Situation(
            time_s=0.0,
            targets=PlannerTargets(),
            lead_s=120.0,
            demands={Role.BOTH: demand},
            performance={Role.BOTH: PERFORMANCE},
            supply={Role.BOTH: 4},
        )
        policy = Hpa(HpaConfig(kind="hpa", requests_per_worker=60))
        assert policy.propose(situation)[Role.BOTH].workers == workers
