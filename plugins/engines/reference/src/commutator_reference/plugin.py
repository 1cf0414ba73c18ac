"""Registers the `reference` engine. Imports nothing heavy."""

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
from commutator.engine import TokenApiClient, engine_command
from commutator.kv.transfer.protocol import PullHandover
from commutator_reference.config import ReferenceConfig

__all__ = ["ReferenceConnector"]


class ReferenceConnector(EngineConnector[ReferenceConfig]):
    """Starts `python -m commutator_reference` and speaks the token API to it."""

    uses_tiers = True

    def launch_plan(self, config: ReferenceConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("commutator_reference", config, context)

    def connect(self, config: ReferenceConfig, address: str) -> EngineClient:
        return TokenApiClient(address)

    def handover_style(self, config: ReferenceConfig) -> HandoverStyle:
        return PullHandover(config.handover_lease_s)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("reference", ReferenceConfig, ReferenceConnector(), stability="beta")
