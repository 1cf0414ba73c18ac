"""Makes an EngineInfo of the answers of a running server. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from attrs import evolve

from commutator import (
    EngineInfo,
    EngineLoad,
    EventSource,
    KvTransferInfo,
    Operation,
    OptionType,
    RequestOption,
)
from commutator_engine_kit.completions import CONSTRAINTS, ModelList
from commutator_engine_kit.http import reachable_host
from commutator_sglang.messages import KvEvents, KvEventsConfig, Loads, ModelInfo, ServerInfo

UNIX_SOCKET = "ipc://"
"""What ZMQ endpoints that are Unix sockets begin with; their absolute path follows."""


_OPTIONS = {
    "stop_regex": RequestOption(
        type=OptionType.STRINGS, description="Regular expressions that end the answer."
    )
}


def engine_info(
    url: str,
    server: ServerInfo,
    model: ModelInfo,
    models: ModelList,
    given_events: EventSource | None,
) -> EngineInfo:
    """``given_events``, from the configuration, take precedence over the server's."""
    lengths = [card.max_model_len for card in models.data if card.max_model_len is not None]
    ranks = server.dp_size if server.kv_events is None else server.kv_events.dp_size
    info = EngineInfo(
        kind="sglang",
        version=server.version,
        model=model.served_model_name,
        # Longer requests would be truncated at the limit of the model or of the memory.
        max_model_len=min([server.max_req_input_len, *lengths]),
        block_size=server.page_size,
        kv_capacity_blocks=ranks * (server.max_total_num_tokens // server.page_size),
        caches_prefixes=not server.disable_radix_cache,
        data_parallel_size=ranks,
        kv_events=given_events or event_source(server.kv_events, url),
        continues_answers=True,
        forwards=True,
        constraints=CONSTRAINTS,
        adapters=True,
        prompt_logprobs=server.disaggregation_mode == "null",
        request_options=_OPTIONS,
        handover=_handover(url, server, model.served_model_name),
        computes_prompts=server.disaggregation_mode != "decode",
    )
    if model.is_generation:
        return info
    return evolve(
        info,
        operations=(Operation.EMBED,),
        continues_answers=False,
        constraints=(),
        prompt_logprobs=False,
        request_options={},
    )


def event_source(events: KvEvents | None, url: str) -> EventSource | None:
    """The address to subscribe to for KV events; None when the server publishes none.

    The host of ``url`` replaces the address of a server that listens on all addresses.
    """
    if events is None or events.publisher != "zmq":
        return None
    host = reachable_host(events.endpoint_host, url)
    replay = events.replay_endpoint_port_base

    def of_rank(rank: int) -> EventSource:
        return EventSource(
            endpoint=f"tcp://{host}:{events.endpoint_port_base + rank}",
            replay_endpoint=None if replay is None else f"tcp://{host}:{replay + rank}",
            topic=events.topic,
        )

    first, *others = map(of_rank, range(events.dp_size))
    return evolve(first, further_ranks=tuple(others))


def private_event_source(server: ServerInfo) -> EventSource | None:
    """The Unix sockets on which a server of one rank publishes KV events; None if there are none.

    SGLang describes TCP addresses only, so they are read from the server's own option.
    """
    if server.kv_events_config is None or server.dp_size > 1:
        return None
    try:
        config = msgspec.json.decode(server.kv_events_config, type=KvEventsConfig)
    except msgspec.DecodeError:
        return None
    if config.publisher != "zmq" or not config.endpoint.startswith(UNIX_SOCKET + "/"):
        return None
    return EventSource(
        endpoint=config.endpoint, replay_endpoint=config.replay_endpoint, topic=config.topic
    )


def _handover(url: str, server: ServerInfo, model: str) -> KvTransferInfo | None:
    """How a server hands KV over; None when it does not. Sizes SGLang does not report are 0."""
    if server.disaggregation_mode not in {"prefill", "decode"}:
        return None
    host, port = urlsplit(url).hostname, server.disaggregation_bootstrap_port
    return KvTransferInfo(
        protocol=f"sglang-{server.disaggregation_transfer_backend}",
        identity=f"{model} SGLang {server.version} {server.dtype} {server.kv_cache_dtype}",
        block_size=server.page_size,
        token_bytes=0,
        tensor_parallel_size=server.tp_size,
        address=None if port is None else f"{host}:{port}",
    )


def engine_load(loads: Loads, page_size: int, capacity_blocks: int) -> EngineLoad:
    """The load, summed over the ranks. SGLang does not count cached tokens as used."""
    return EngineLoad(
        running=sum(load.num_running_reqs for load in loads.loads),
        waiting=sum(load.num_waiting_reqs for load in loads.loads),
        kv_used_blocks=sum(-(-load.num_used_tokens // page_size) for load in loads.loads),
        kv_capacity_blocks=capacity_blocks,
    )
