"""Registers the `sglang` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator import (
    EngineClient,
    EngineRegister,
    EventSource,
    HandoverStyle,
    LaunchContext,
    LaunchPlan,
    ModelConfig,
    TierConfig,
    hookimpl,
)
from commutator_engine_kit.launching import HttpRelay, ServerConnector
from commutator_sglang.config import SglangConfig
from commutator_sglang.handover import RoomHandover

__all__ = ["SglangConnector"]


class SglangConnector(ServerConnector[SglangConfig]):
    """Launches SGLang's server, or attaches to one, and talks HTTP to it."""

    def paths(self) -> HttpRelay:
        from commutator_sglang.client import PATHS

        return PATHS

    def problems(
        self, config: SglangConfig, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        from commutator_sglang.launch import problems

        return () if config.url is not None else problems(config, model, tiers)

    def warnings(self, config: SglangConfig, model: ModelConfig) -> Iterable[str]:
        from commutator_sglang.launch import warnings

        return () if config.url is not None else warnings(config)

    def launch(self, config: SglangConfig, context: LaunchContext) -> LaunchPlan:
        from commutator_sglang.launch import launch_plan

        return launch_plan(config, context)

    def connect(self, config: SglangConfig, address: str) -> EngineClient:
        from commutator_sglang.client import SglangClient

        return SglangClient(
            address,
            api_key=self.client_key(config, address),
            of_cluster=address != config.url,
            kv_events=None
            if config.kv_events is None
            else EventSource(endpoint=config.kv_events, replay_endpoint=config.kv_events_replay),
        )

    def handover_style(self, config: SglangConfig) -> HandoverStyle | None:
        return RoomHandover()  # each server reports whether it takes part


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("sglang", SglangConfig, SglangConnector(), stability="beta")
