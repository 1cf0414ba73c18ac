"""Registers the `trtllm` engine. Imports nothing heavy."""

from __future__ import annotations

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    hookimpl,
)
from commutator.engine.handover import HandoverStyle
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.handover import ContextFirst

__all__ = ["TrtllmConnector"]


class TrtllmConnector(EngineConnector[TrtllmConfig]):
    """Starts a sidecar, and TensorRT-LLM's own server unless that runs; speaks HTTP to both."""

    uses_tiers = True

    def launch_plan(self, config: TrtllmConfig, context: LaunchContext) -> LaunchPlan:
        from commutator_trtllm.launch import launch_plan  # noqa: PLC0415 - only the supervisor starts

        return launch_plan(config, context)

    def connect(self, config: TrtllmConfig, address: str) -> EngineClient:
        from commutator_trtllm.client import TrtllmClient  # noqa: PLC0415 - brings an HTTP client

        return TrtllmClient(address)

    def handover_style(self, config: TrtllmConfig) -> HandoverStyle | None:
        return ContextFirst() if config.takes_part_in_handovers else None


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("trtllm", TrtllmConfig, TrtllmConnector())
