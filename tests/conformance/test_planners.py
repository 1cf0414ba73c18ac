"""Every planner passes the shipped suite, and what `slo` is made of passes suites of its own."""

from __future__ import annotations

from typing import Any

from tests.support.slo_suites import ConstraintContract, ForecasterContract

from commutator.contract.planner import PlannerContext, PlannerPolicy
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.pipeline import no_growth
from commutator_slo.policy import Slo
from commutator_slo.ratio import Ratio, RatioConfig
from commutator_slo.situation import Forecaster, Limit, PlanConstraint, Situation
from commutator_testing.planners import PERFORMANCE, PlannerContract


class TestSlo(PlannerContract):
    def make_policy(self, context: PlannerContext) -> PlannerPolicy[Any]:
        return Slo(SloConfig(kind="slo"), context)


class TestGrowth(ForecasterContract):
    def make_forecaster(self) -> Forecaster[Any]:
        return Growth(GrowthConfig(kind="growth"))


class TestNoGrowth(ForecasterContract):
    def make_forecaster(self) -> Forecaster[Any]:
        return no_growth()


class TestRatio(ConstraintContract):
    def make_constraint(self) -> PlanConstraint:
        return Ratio(RatioConfig(kind="ratio", least=0.5, most=2.0))

    def test_prefill_follows_decode(self) -> None:
        situation = Situation(
            time_s=0.0,
            targets=SloConfig(kind="slo").targets,
            lead_s=1.0,
            demands={},
            performance={Role.PREFILL: PERFORMANCE, Role.DECODE: PERFORMANCE},
            supply={},
        )
        limits = self.make_constraint().limits({Role.PREFILL: 9, Role.DECODE: 3}, situation)
        reason = "the ratio to 3 decode workers"
        assert limits == {Role.PREFILL: Limit(floor=2, ceiling=6, reason=reason)}
        assert self.make_constraint().limits({Role.BOTH: 3}, situation) == {}
