"""Registers the `vllm` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from commutator import EngineClient, EngineRegister, HandoverStyle, hookimpl
from commutator_engine_kit.launching import HttpRelay, ServerConnector
from commutator_vllm.config import VllmConfig
from commutator_vllm.handover import NixlHandover


class VllmConnector(ServerConnector[VllmConfig]):
    """Launches vLLM's API server, or attaches to one; talks HTTP or the token API to it."""

    launch_module = "commutator_vllm.launch"
    spans_nodes = True

    def paths(self) -> HttpRelay:
        from commutator_vllm.client import PATHS

        return PATHS

    def connect(self, config: VllmConfig, address: str) -> EngineClient:
        from commutator_vllm.client import TokenApiAddress, VllmClient, VllmTokenClient

        both = TokenApiAddress.parse(address)
        if both is not None and config.url is None:
            return VllmTokenClient(both, hands_over=config.takes_part_in_handovers)
        return VllmClient(
            address,
            hands_over=config.takes_part_in_handovers,
            use_priority=config.url is None or config.use_priority,
            kv_events=config.event_source,
            **self.access(config, address),
        )

    def handover_style(self, config: VllmConfig) -> HandoverStyle | None:
        return NixlHandover() if config.takes_part_in_handovers else None


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("vllm", VllmConfig, VllmConnector(), stability="beta")
