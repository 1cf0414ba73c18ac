"""What the answers and the /metrics page of a running server say about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from attrs import evolve, frozen
from prometheus_client.parser import text_string_to_metric_families

from commutator import EngineInfo, EngineLoad, EventSource, Operation, OptionType, RequestOption
from commutator.errors import EngineError
from commutator_engine_kit.completions import CONSTRAINTS, ModelList
from commutator_engine_kit.http import reachable_host
from commutator_vllm.handover import handover_info
from commutator_vllm.messages import CLASSIFY, EMBEDDINGS

_WANTED = (
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


class KvEventSource(msgspec.Struct):
    """The KV event publisher of one rank, from GET /kv_event_sources."""

    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"


_OPTIONS = {
    "bad_words": RequestOption(
        type=OptionType.STRINGS, description="Words that must not be generated."
    ),
    "allowed_token_ids": RequestOption(
        type=OptionType.INTEGERS,
        minimum=0,
        most=1 << 20,
        description="The only tokens that may be generated.",
    ),
    "logprob_token_ids": RequestOption(
        type=OptionType.INTEGERS,
        minimum=0,
        most=128,
        description="Tokens whose log probabilities are returned instead of the likeliest ones.",
    ),
    "thinking_token_budget": RequestOption(
        type=OptionType.INTEGER,
        minimum=0,
        description="Tokens of reasoning after which it is ended.",
    ),
}


@frozen
class CacheFacts:
    """The size of the KV cache, summed over all ranks."""

    block_size: int
    """Tokens in one block of KV events."""
    capacity_blocks: int
    ranks: int
    caches_prefixes: bool = True


NO_CACHE = CacheFacts(block_size=16, capacity_blocks=0, ranks=1)
"""Of a server that has none; blocks are the unit in which routing counts."""


class ServedPaths(msgspec.Struct):
    """What GET /openapi.json lists: a server has the paths of what its model can do."""

    paths: dict[str, Any] = {}


def operations_of(served: ServedPaths) -> tuple[str, ...]:
    """In words of ``Operation``; a server that tells no paths generates."""
    if not served.paths or "/v1/completions" in served.paths:
        return (Operation.GENERATE,)
    for path, operation in ((EMBEDDINGS, Operation.EMBED), (CLASSIFY, Operation.CLASSIFY)):
        if path in served.paths:
            return (operation,)
    return ("pooling",)


def engine_info(
    version: str,
    models: ModelList,
    facts: CacheFacts,
    events: EventSource | None,
    *,
    hands_over: bool = False,
) -> EngineInfo:
    """Raises EngineError when the server has no model that generates text."""
    model, max_model_len = base_model(models)
    return EngineInfo(
        kind="vllm",
        version=version,
        model=model,
        max_model_len=max_model_len,
        block_size=facts.block_size,
        kv_capacity_blocks=facts.capacity_blocks,
        caches_prefixes=facts.caches_prefixes,
        data_parallel_size=facts.ranks,
        kv_events=events,
        continues_answers=True,
        forwards=True,
        constraints=CONSTRAINTS,
        adapters=True,
        prompt_logprobs=True,
        request_options=_OPTIONS,
        handover=handover_info(model, version, facts.block_size) if hands_over else None,
    )


def base_model(models: ModelList) -> tuple[str, int]:
    """The name of the model that is no adapter, and its longest prompt plus answer in tokens.

    Raises EngineError when the server lists no such model.
    """
    for card in models.data:
        if card.parent is None and card.max_model_len is not None:
            return card.id, card.max_model_len
    raise EngineError("this vLLM server lists no model")


def event_source(
    sources: Mapping[str, KvEventSource], url: str, given: EventSource | None
) -> EventSource | None:
    """The address to subscribe to for KV events; None when the server publishes none.

    ``sources`` maps a rank's number to its publisher. ``given``, from the configuration, takes
    precedence. The host of ``url`` replaces the address of a server that listens on all addresses.
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
    first, *others = by_rank
    return evolve(first, further_ranks=tuple(others))


def _reachable(source: KvEventSource, url: str) -> EventSource:
    replay = source.replay_endpoint
    return EventSource(
        endpoint=_at_host(source.endpoint, url),
        replay_endpoint=None if replay is None else _at_host(replay, url),
        topic=source.topic,
    )


def _at_host(endpoint: str, url: str) -> str:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (
        f"tcp://{reachable_host(host, url)}:{port}" if endpoint.startswith("tcp://") else endpoint
    )


def cache_facts(page: str) -> CacheFacts | None:
    """None when the page has no `vllm:cache_config_info`, or the server is still starting."""
    blocks, size, ranks, caches = 0, 0, 0, True
    for name, labels, _ in _samples(page):
        if name == "vllm:cache_config_info":
            blocks += _number(labels.get("num_gpu_blocks"))
            hashed = _number(labels.get("hash_block_size"))
            size = hashed or _number(labels.get("block_size"))
            ranks += 1
            caches &= labels.get("enable_prefix_caching") != "False"
    return CacheFacts(size, blocks, ranks, caches) if blocks and size else None


def engine_load(page: str, facts: CacheFacts) -> EngineLoad:
    """The load, summed over the ranks. Blocks that are cached but not in use count as free."""
    running = waiting = used = 0.0
    for name, _, value in _samples(page):
        if name == "vllm:num_requests_running":
            running += value
        elif name == "vllm:num_requests_waiting":
            waiting += value
        elif name == "vllm:kv_cache_usage_perc":
            used += value * facts.capacity_blocks / facts.ranks
    return EngineLoad(
        running=int(running),
        waiting=int(waiting),
        kv_used_blocks=round(used),
        kv_capacity_blocks=facts.capacity_blocks,
    )


def _samples(page: str) -> Iterable[tuple[str, dict[str, str], float]]:
    """Parses only the metrics in _WANTED: the page has thousands of lines."""
    lines = (line for line in page.splitlines() if line.startswith(_WANTED))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _number(label: str | None) -> int:
    return int(label) if label is not None and label.isdigit() else 0
