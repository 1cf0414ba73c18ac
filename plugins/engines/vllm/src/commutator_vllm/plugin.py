"""Registers the `vllm` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from commutator import EngineClient, EngineRegister, HandoverStyle, hookimpl
from commutator_engine_kit.launching import HttpRelay, ServerConnector
from commutator_engine_kit.model_kv import KvSupport, ModelKv, WithKvSupport
from commutator_vllm.config import VllmConfig
from commutator_vllm.handover import NixlHandover


class VllmConnector(WithKvSupport, ServerConnector[VllmConfig]):
    """Launches vLLM's API server, or attaches to one; talks HTTP or the token API to it."""

    launch_module = "commutator_vllm.launch"
    spans_nodes = True

    def paths(self) -> HttpRelay:
        from commutator_vllm.client import PATHS

        return PATHS

    def kv_support(self, model: ModelKv) -> KvSupport:
        from commutator_vllm.model_support import support

        return support(model)

    def kv_number_bytes(self, config: VllmConfig, model: ModelKv) -> tuple[int, int]:
        from commutator_vllm.model_support import number_bytes

        return number_bytes(config.args, model)

    def connect(self, config: VllmConfig, address: str) -> EngineClient:
        from commutator_vllm.client import TokenApiAddress, VllmClient, VllmTokenClient

        both = TokenApiAddress.parse(address)
        if both is not None and config.url is None:
            return VllmTokenClient(
                both,
                hands_over=config.takes_part_in_handovers,
                llguidance=config.enforces_with_llguidance,
            )
        return VllmClient(
            address,
            hands_over=config.takes_part_in_handovers,
            use_priority=config.url is None or config.use_priority,
            kv_events=config.event_source,
            llguidance=config.enforces_with_llguidance,
            **self.access(config, address),
        )

    def handover_style(self, config: VllmConfig) -> HandoverStyle | None:
        return NixlHandover() if config.takes_part_in_handovers else None


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("vllm", VllmConfig, VllmConnector(), stability="beta")
