"""What vLLM's /metrics page tells of its KV cache and of its load. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen
from prometheus_client.parser import text_string_to_metric_families

from commutator.types import EngineLoad

__all__ = ["CacheFacts", "cache_facts", "engine_load"]

_WANTED = (
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


@frozen
class CacheFacts:
    """The KV cache of all ranks together."""

    block_size: int
    """Tokens in one block, as KV events count them."""
    capacity_blocks: int
    ranks: int


def cache_facts(page: str) -> CacheFacts | None:
    """None when the page does not tell: without `vllm:cache_config_info`, or before its start."""
    blocks, size, ranks = 0, 0, 0
    for name, labels, _ in _samples(page):
        if name == "vllm:cache_config_info":
            blocks += _number(labels.get("num_gpu_blocks"))
            hashed = _number(labels.get("hash_block_size"))
            size = hashed or _number(labels.get("block_size"))
            ranks += 1
    return CacheFacts(size, blocks, ranks) if blocks and size else None


def engine_load(page: str, facts: CacheFacts) -> EngineLoad:
    """Sums over the ranks. Blocks that are only cached are free ones to vLLM."""
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
    """Only the lines that are wanted are parsed: the page has thousands."""
    lines = (line for line in page.splitlines() if line.startswith(_WANTED))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _number(label: str | None) -> int:
    return int(label) if label is not None and label.isdigit() else 0
