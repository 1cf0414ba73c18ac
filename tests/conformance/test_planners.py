"""Every planner passes the shipped suite."""

from __future__ import annotations

from typing import Any

from commutator.contract.planner import PlannerContext, PlannerPolicy
from commutator_slo.config import SloConfig
from commutator_slo.plugin import Slo
from commutator_testing.planners import PlannerContract


class TestSlo(PlannerContract):
    def make_policy(self, context: PlannerContext) -> PlannerPolicy[Any]:
        return Slo(SloConfig(kind="slo"), context)


class TestSloWithoutForecasts(PlannerContract):
    def make_policy(self, context: PlannerContext) -> PlannerPolicy[Any]:
        return Slo(SloConfig(kind="slo", forecaster=None), context)
