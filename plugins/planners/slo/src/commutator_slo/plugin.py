"""The planner kind `slo`."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.registration import PlannerRegister
from commutator_slo.config import SloConfig
from commutator_slo.policy import Slo


@hookimpl
def planner_register(register: PlannerRegister) -> None:
    register("slo", SloConfig, Slo)
