"""Registers the `trtllm` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    HandoverStyle,
    LaunchContext,
    LaunchPlan,
    ModelConfig,
    TierConfig,
    hookimpl,
)
from commutator_engine_kit.model_kv import KvSupport, ModelKv, WithKvSupport
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.handover import ContextFirst


class TrtllmConnector(WithKvSupport, EngineConnector[TrtllmConfig]):
    """Launches a sidecar, and the server unless `url` names one; talks HTTP to both."""

    uses_tiers = True

    def problems(
        self, config: TrtllmConfig, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        from commutator_trtllm.launch import problems

        return problems(config, model, tiers)

    def devices(self, config: TrtllmConfig) -> Sequence[int]:
        return config.gpus

    def launch_plan(self, config: TrtllmConfig, context: LaunchContext) -> LaunchPlan:
        from commutator_trtllm.launch import launch_plan

        return launch_plan(config, context)

    def kv_support(self, model: ModelKv) -> KvSupport:
        from commutator_trtllm.model_support import support

        return support(model)

    def connect(self, config: TrtllmConfig, address: str) -> EngineClient:
        from commutator_trtllm.client import TrtllmClient

        return TrtllmClient(address)

    def handover_style(self, config: TrtllmConfig) -> HandoverStyle | None:
        return ContextFirst() if config.takes_part_in_handovers else None


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("trtllm", TrtllmConfig, TrtllmConnector())
