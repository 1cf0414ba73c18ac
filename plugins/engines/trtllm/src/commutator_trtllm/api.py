"""The parts of TensorRT-LLM's HTTP answers that are read; what else they hold is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = [
    "BlockData",
    "CacheEvent",
    "Choice",
    "Chunk",
    "IterationStats",
    "KvCacheStats",
    "LevelChange",
    "ModelList",
    "Token",
    "Usage",
    "Version",
]


class Logprobs(msgspec.Struct):
    """Tokens are named by their text here, which does not tell which they are."""

    token_logprobs: Sequence[float | None] = ()


class Choice(msgspec.Struct):
    """What one chunk adds to the answer."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    disaggregated_params: dict[str, Any] | None = None


class PromptTokensDetails(msgspec.Struct):
    """Part of ``Usage``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Ends a stream."""

    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """One server-sent event of /v1/completions, or a whole answer, or an error."""

    choices: list[Choice] = []
    usage: Usage | None = None
    object: str = ""
    message: str = ""
    """Of an error."""
    error: Any = None
    """Of an error in the request's form: its text, or an object that has a message."""


class Version(msgspec.Struct):
    """Of GET /version."""

    version: str


class ModelCard(msgspec.Struct):
    """One model."""

    id: str


class ModelList(msgspec.Struct):
    """Of GET /v1/models."""

    data: list[ModelCard]


class KvCacheStats(msgspec.Struct, rename="camel"):
    """Part of ``IterationStats``."""

    max_num_blocks: int = 0
    used_num_blocks: int = 0
    free_num_blocks: int = 0
    tokens_per_block: int = 0


class InflightBatchingStats(msgspec.Struct, rename="camel"):
    """Part of ``IterationStats``."""

    num_paused_requests: int = 0


class IterationStats(msgspec.Struct, rename="camel"):
    """One of GET /metrics: the state after one step of the engine, or of one rank of it."""

    num_active_requests: int = 0
    num_queued_requests: int = 0
    attention_dp_rank: int | None = None
    kv_cache_stats: KvCacheStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None


class Token(msgspec.Struct):
    """A token of a block; ``token_extra_id`` is not 0 when it stands for something else."""

    token_id: int
    token_extra_id: int = 0


class BlockData(msgspec.Struct):
    """One block of a `stored` event."""

    block_hash: int
    tokens: list[Token] = []
    cache_level: int = 0
    lora_id: int | None = None
    mm_keys: list[Any] | None = None


class LevelChange(msgspec.Struct):
    """Part of an `updated` event."""

    old_value: int
    new_value: int


class CacheEventData(msgspec.Struct):
    """What happened; which fields count is told by ``type``."""

    type: str
    parent_hash: int | None = None
    blocks: list[BlockData] = []
    block_hashes: list[int] = []
    block_hash: int | None = None
    cache_level: LevelChange | None = None


class CacheEvent(msgspec.Struct):
    """One of POST /kv_cache_events."""

    event_id: int
    data: CacheEventData
    window_size: int | None = None
    attention_dp_rank: int | None = None
