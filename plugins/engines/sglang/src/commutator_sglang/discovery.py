"""What a running server is, put together from its own answers. Pure."""

from __future__ import annotations

from commutator.engine.http import host_for_us
from commutator.errors import EngineError
from commutator.types import EngineInfo, EngineLoad, EventSource
from commutator_sglang.api import KvEvents, Loads, ModelInfo, ModelList, ServerInfo
from commutator_sglang.handover import handover_info

__all__ = ["engine_info", "engine_load", "event_source"]


def engine_info(
    url: str,
    server: ServerInfo,
    model: ModelInfo,
    models: ModelList,
    given_events: EventSource | None,
) -> EngineInfo:
    """``given_events`` come before what the server tells. Raises EngineError for an embedder."""
    if not model.is_generation:
        raise EngineError(f"the SGLang server at {url} serves a model that generates no text")
    lengths = [card.max_model_len for card in models.data if card.max_model_len is not None]
    ranks = server.dp_size if server.kv_events is None else server.kv_events.dp_size
    return EngineInfo(
        kind="sglang",
        version=server.version,
        model=model.served_model_name,
        # Longer ones would be cut off where the model or the memory ends.
        max_model_len=min([server.max_req_input_len, *lengths]),
        block_size=server.page_size,
        kv_capacity_blocks=ranks * (server.max_total_num_tokens // server.page_size),
        data_parallel_size=ranks,
        kv_events=given_events or event_source(server.kv_events, url),
        continues_answers=True,
        forwards=True,
        handover=handover_info(url, server, model.served_model_name),
        computes_prompts=server.disaggregation_mode != "decode",
    )


def event_source(events: KvEvents | None, url: str) -> EventSource | None:
    """A server that listens on every address is reached at its own host."""
    if events is None or events.publisher != "zmq":
        return None
    host = host_for_us(events.endpoint_host, url)
    replay = events.replay_endpoint_port_base

    def of_rank(rank: int) -> EventSource:
        return EventSource(
            f"tcp://{host}:{events.endpoint_port_base + rank}",
            None if replay is None else f"tcp://{host}:{replay + rank}",
            events.topic,
        )

    first = of_rank(0)
    others = tuple(of_rank(rank) for rank in range(1, events.dp_size))
    return EventSource(first.endpoint, first.replay_endpoint, first.topic, others)


def engine_load(loads: Loads, page_size: int, capacity_blocks: int) -> EngineLoad:
    """Sums over the ranks. What is only cached is not in use to SGLang."""
    return EngineLoad(
        running=sum(load.num_running_reqs for load in loads.loads),
        waiting=sum(load.num_waiting_reqs for load in loads.loads),
        kv_used_blocks=sum(-(-load.num_used_tokens // page_size) for load in loads.loads),
        kv_capacity_blocks=capacity_blocks,
    )
