"""Registers the `sglang` engine. Imports nothing heavy."""

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
from commutator_sglang.config import SglangConfig
from commutator_sglang.handover import RoomHandover

__all__ = ["SglangConnector"]

log = logging.getLogger(__name__)

_NOT_ITS_TIERS = "%s runs already: it has the storage backend of its own HiCache, not our tiers"


class SglangConnector(EngineConnector[SglangConfig]):
    """Starts SGLang's own server, or attaches to one, and speaks HTTP to it."""

    uses_tiers = True

    def launch_plan(self, config: SglangConfig, context: LaunchContext) -> LaunchPlan | None:
        if config.url is not None:
            if context.tiers:
                log.warning(_NOT_ITS_TIERS, context.worker_id)
            return None
        from commutator_sglang.launch import launch_plan  # noqa: PLC0415 - only to start one

        return launch_plan(config, context)

    def attach_address(self, config: SglangConfig) -> str:
        assert config.url is not None
        return config.url

    def connect(self, config: SglangConfig, address: str) -> EngineClient:
        from commutator_sglang.client import SglangClient  # noqa: PLC0415 - brings an HTTP client

        return SglangClient(
            address,
            api_key=None if config.api_key is None else config.api_key.reveal(),
            kv_events=None
            if config.kv_events is None
            else EventSource(config.kv_events, config.kv_events_replay),
        )

    def handover_style(self, config: SglangConfig) -> HandoverStyle | None:
        return RoomHandover()  # each server tells whether it takes part


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("sglang", SglangConfig, SglangConnector(), stability="beta")
