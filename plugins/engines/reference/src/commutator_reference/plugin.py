"""Registers the `reference` engine. Modules with heavy imports are loaded when they are used."""

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
from commutator.engine import TokenApiClient
from commutator_engine_kit import engine_command
from commutator_engine_kit.kv.transfer import PullHandover
from commutator_engine_kit.model_kv import KvSupport, ModelKv, WithKvSupport
from commutator_reference.config import ReferenceConfig


class ReferenceConnector(WithKvSupport, EngineConnector[ReferenceConfig]):
    """Starts `python -m commutator_reference` and speaks the token API to it."""

    secures_connections = True
    uses_tiers = True

    def problems(
        self, config: ReferenceConfig, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        from commutator_reference.preflight import problems

        return problems(config, model, tiers)

    def warnings(self, config: ReferenceConfig, model: ModelConfig) -> Iterable[str]:
        from commutator_reference.preflight import warnings

        return warnings(config, model)

    def launch_plan(self, config: ReferenceConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("commutator_reference", config, context)

    def kv_support(self, model: ModelKv) -> KvSupport:
        from commutator_reference.model_support import support

        return support(model)

    def kv_number_bytes(self, config: ReferenceConfig, model: ModelKv) -> tuple[int, int]:
        from commutator_reference.preflight import number_bytes

        del model
        return number_bytes(config), 4

    def connect(self, config: ReferenceConfig, address: str) -> EngineClient:
        return TokenApiClient(address)

    def handover_style(self, config: ReferenceConfig) -> HandoverStyle:
        return PullHandover(config.handover_lease_s)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("reference", ReferenceConfig, ReferenceConnector(), stability="beta")
