"""The shipped suite, and the published formula."""

from __future__ import annotations

from typing import Any

import pytest

from commutator.contract.planner import (
    Observation,
    PlannedWorker,
    PlannerContext,
    PlannerPolicy,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator_hpa import Hpa, HpaConfig
from commutator_testing.planners import CONTEXT, PlannerContract


class TestHpa(PlannerContract):
    def make_policy(self, context: PlannerContext) -> PlannerPolicy[Any]:
        return Hpa(HpaConfig(kind="hpa"), context)

    @pytest.mark.parametrize(("average", "workers"), [(90, 6), (64, 4), (30, 2)])
    def test_workers_follow_the_average_load(self, average: int, workers: int) -> None:
        fleet = [
            PlannedWorker(
                worker_id=f"w-{number}",
                role=Role.BOTH,
                phase=WorkerPhase.READY,
                age_s=100.0,
                active_requests=average,
            )
            for number in range(4)
        ]
        policy = Hpa(HpaConfig(kind="hpa", requests_per_worker=60), CONTEXT)
        seen = Observation(time_s=0.0, window_s=0.0, arrivals={}, workers=fleet)
        _, sizing = policy.propose(policy.begin(), seen)
        assert sizing.roles[Role.BOTH].workers == workers
