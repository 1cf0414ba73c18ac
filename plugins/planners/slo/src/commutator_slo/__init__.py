"""The planner kind `slo`, the forecaster `growth` and the constraint `ratio`."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.registration import ConstraintRegister, ForecastRegister, PlannerRegister
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.policy import Slo, SloConfig
from commutator_slo.ratio import Ratio, RatioConfig

__all__ = [
    "Growth",
    "GrowthConfig",
    "Ratio",
    "RatioConfig",
    "Slo",
    "SloConfig",
]


@hookimpl
def planner_register(register: PlannerRegister) -> None:
    register("slo", SloConfig, Slo)


@hookimpl
def forecast_register(register: ForecastRegister) -> None:
    register("growth", GrowthConfig, Growth)


@hookimpl
def constraint_register(register: ConstraintRegister) -> None:
    register("ratio", RatioConfig, Ratio)
