"""Registers the `sim` engine."""

from __future__ import annotations

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    HandoverStyle,
    LaunchContext,
    LaunchPlan,
    hookimpl,
)
from commutator.contract.planner import EnginePerformance
from commutator.engine import TokenApiClient
from commutator_engine_kit import engine_command
from commutator_engine_kit.kv.transfer import PullHandover
from commutator_sim.config import SimConfig


class SimConnector(EngineConnector[SimConfig]):
    """Starts `python -m commutator_sim` and speaks the token API to it."""

    secures_connections = True

    def launch_plan(self, config: SimConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("commutator_sim", config, context)

    def connect(self, config: SimConfig, address: str) -> EngineClient:
        return TokenApiClient(address)

    def handover_style(self, config: SimConfig) -> HandoverStyle:
        return PullHandover()

    def performance(self, config: SimConfig) -> EnginePerformance | None:
        if not config.time_factor:  # as fast as the machine, which the options do not tell
            return None
        return config.performance(config.time_factor)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("sim", SimConfig, SimConnector(), stability="beta")
