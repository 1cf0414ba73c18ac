"""Registers the `sglang` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from commutator import EngineClient, EngineRegister, HandoverStyle, hookimpl
from commutator_engine_kit.launching import HttpRelay, ServerConnector
from commutator_engine_kit.model_kv import KvSupport, ModelKv, WithKvSupport
from commutator_sglang.config import SglangConfig
from commutator_sglang.handover import RoomHandover


class SglangConnector(WithKvSupport, ServerConnector[SglangConfig]):
    """Launches SGLang's server, or attaches to one, and talks HTTP to it."""

    launch_module = "commutator_sglang.launch"

    def paths(self) -> HttpRelay:
        from commutator_sglang.client import PATHS

        return PATHS

    def kv_support(self, model: ModelKv) -> KvSupport:
        from commutator_sglang.model_support import support

        return support(model)

    def connect(self, config: SglangConfig, address: str) -> EngineClient:
        from commutator_sglang.client import SglangClient

        access = self.access(config, address)
        return SglangClient(address, kv_events=config.event_source, **access)

    def handover_style(self, config: SglangConfig) -> HandoverStyle | None:
        return RoomHandover()  # each server reports whether it takes part


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("sglang", SglangConfig, SglangConnector(), stability="beta")
