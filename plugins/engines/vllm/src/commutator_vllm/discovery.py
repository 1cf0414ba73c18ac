"""What a running server is, put together from its own answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from commutator.engine.http import host_for_us
from commutator.errors import EngineError
from commutator.types import EngineInfo, EventSource
from commutator_vllm.api import KvEventSource, ModelList
from commutator_vllm.handover import handover_info
from commutator_vllm.metrics import CacheFacts

__all__ = ["base_model", "engine_info", "event_source"]


def engine_info(
    version: str,
    models: ModelList,
    facts: CacheFacts,
    events: EventSource | None,
    *,
    hands_over: bool = False,
) -> EngineInfo:
    """Raises EngineError when the server generates nothing."""
    model, max_model_len = base_model(models)
    return EngineInfo(
        kind="vllm",
        version=version,
        model=model,
        max_model_len=max_model_len,
        block_size=facts.block_size,
        kv_capacity_blocks=facts.capacity_blocks,
        data_parallel_size=facts.ranks,
        kv_events=events,
        continues_answers=True,
        forwards=True,
        handover=handover_info(model, version, facts.block_size) if hands_over else None,
    )


def base_model(models: ModelList) -> tuple[str, int]:
    """The name that requests give, and the longest prompt plus answer; adapters come after it."""
    for card in models.data:
        if card.parent is None and card.max_model_len is not None:
            return card.id, card.max_model_len
    raise EngineError("this vLLM server lists no model that generates text")


def event_source(
    sources: Mapping[str, KvEventSource], url: str, given: EventSource | None
) -> EventSource | None:
    """Where KV events are subscribed to; ``sources`` has the publisher of each rank by number.

    ``given`` comes first. A server that listens on every address is reached at its own host.
    """
    if given is not None:
        return given
    by_rank = [
        _reachable(source, url)
        for _, source in sorted(sources.items(), key=lambda item: int(item[0]))
        if source.enable_kv_cache_events and source.publisher != "null" and source.endpoint
    ]
    if not by_rank:
        return None
    first = by_rank[0]
    return EventSource(first.endpoint, first.replay_endpoint, first.topic, tuple(by_rank[1:]))


def _reachable(source: KvEventSource, url: str) -> EventSource:
    replay = source.replay_endpoint
    return EventSource(
        _at_host(source.endpoint, url),
        None if replay is None else _at_host(replay, url),
        source.topic,
    )


def _at_host(endpoint: str, url: str) -> str:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host_for_us(host, url)}:{port}" if endpoint.startswith("tcp://") else endpoint
