"""The parts of SGLang's HTTP answers that we read; other fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Chunk",
    "FinishedBecause",
    "KvEvents",
    "KvEventsConfig",
    "Loads",
    "MetaInfo",
    "ModelInfo",
    "RankLoad",
    "ServerInfo",
]

Logprob = tuple[float | None, int, str | None]
"""Its value, the token's id, and the token's text if requested."""


class FinishedBecause(msgspec.Struct):
    """Why a request ended; ``type`` is stop, length or abort."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct):
    """What a chunk says beside its tokens."""

    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: FinishedBecause | None = None
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None


class Chunk(msgspec.Struct):
    """One server-sent event of /generate, or the body of an error answer."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: Any = None
    """A message, or an object with ``message`` and perhaps ``code``."""


class KvEvents(msgspec.Struct):
    """Where KV events are published. These are the ports of rank 0; rank N adds N."""

    publisher: str
    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    dp_size: int = 1
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class KvEventsConfig(msgspec.Struct):
    """The server's `--kv-events-config`."""

    publisher: str = "null"
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""


class ServerInfo(msgspec.Struct):
    """The answer to GET /server_info."""

    version: str
    page_size: int
    max_total_num_tokens: int
    max_req_input_len: int
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    dp_size: int = 1
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    enable_deterministic_inference: bool = False
    kv_events: KvEvents | None = None
    """None for a server that publishes nothing, or on Unix sockets."""
    kv_events_config: str | None = None
    """JSON of ``KvEventsConfig``."""


class ModelInfo(msgspec.Struct):
    """The answer to GET /model_info."""

    served_model_name: str
    is_generation: bool = True


class RankLoad(msgspec.Struct):
    """The load of one data-parallel rank."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0


class Loads(msgspec.Struct):
    """The answer to GET /v1/loads."""

    loads: list[RankLoad]
