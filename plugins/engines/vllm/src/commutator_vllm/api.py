"""The parts of vLLM's HTTP answers that are read; what else they hold is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = [
    "Choice",
    "Chunk",
    "KvEventSource",
    "Logprobs",
    "ModelCard",
    "ModelList",
    "PositionLogprobs",
    "TokenLogprobEntry",
    "Usage",
    "Version",
]


class TokenLogprobEntry(msgspec.Struct):
    """One token and its logprob."""

    token_id: int
    logprob: float


class PositionLogprobs(TokenLogprobEntry):
    """The chosen token at one position; ``top_logprobs`` begins with it again."""

    top_logprobs: list[TokenLogprobEntry] = []


class Logprobs(msgspec.Struct):
    """Of /inference/v1/generate in ``content``, of /v1/completions in the others.

    The latter's tokens are written ``token_id:N``.
    """

    content: list[PositionLogprobs] | None = None
    tokens: Sequence[str] = ()
    token_logprobs: Sequence[float | None] = ()
    top_logprobs: Sequence[dict[str, float] | None] = ()


class Choice(msgspec.Struct):
    """What one chunk adds to the answer."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class PromptTokensDetails(msgspec.Struct):
    """Part of ``Usage``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Ends a stream."""

    prompt_tokens_details: PromptTokensDetails | None = None


class Failure(msgspec.Struct):
    """Why a request failed."""

    message: str = ""
    code: int | None = None


class Chunk(msgspec.Struct):
    """One server-sent event of either endpoint, or a whole answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: Failure | None = None


class Version(msgspec.Struct):
    """Of GET /version."""

    version: str


class ModelCard(msgspec.Struct):
    """One model, or an adapter of ``parent``."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct):
    """Of GET /v1/models."""

    data: list[ModelCard]


class KvEventSource(msgspec.Struct):
    """One rank's publisher, of GET /kv_event_sources."""

    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
