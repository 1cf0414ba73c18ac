"""Registers the `vllm` engine. Imports nothing heavy."""

from __future__ import annotations

import logging

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    hookimpl,
)
from commutator.engine.handover import HandoverStyle
from commutator.types import EventSource
from commutator_vllm.config import VllmConfig
from commutator_vllm.handover import NixlHandover

__all__ = ["VllmConnector"]

log = logging.getLogger(__name__)

_NOT_ITS_TIERS = "%s runs already: it has the tiers of its own --kv-transfer-config, not ours"


class VllmConnector(EngineConnector[VllmConfig]):
    """Starts vLLM's own API server, or attaches to one, and speaks HTTP to it."""

    uses_tiers = True

    def launch_plan(self, config: VllmConfig, context: LaunchContext) -> LaunchPlan | None:
        if config.url is not None:
            if context.tiers:
                log.warning(_NOT_ITS_TIERS, context.worker_id)
            return None
        from commutator_vllm.launch import launch_plan  # noqa: PLC0415 - only the supervisor starts

        return launch_plan(config, context)

    def attach_address(self, config: VllmConfig) -> str:
        assert config.url is not None
        return config.url

    def connect(self, config: VllmConfig, address: str) -> EngineClient:
        from commutator_vllm.client import VllmClient  # noqa: PLC0415 - brings an HTTP client

        return VllmClient(
            address,
            api_key=None if config.api_key is None else config.api_key.reveal(),
            hands_over=config.takes_part_in_handovers,
            use_priority=config.url is None or config.use_priority,
            kv_events=None
            if config.kv_events is None
            else EventSource(config.kv_events, config.kv_events_replay),
        )

    def handover_style(self, config: VllmConfig) -> HandoverStyle | None:
        return NixlHandover() if config.takes_part_in_handovers else None


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("vllm", VllmConfig, VllmConnector(), stability="beta")
