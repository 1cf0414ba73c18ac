"""Values that cross a seam: what is asked of an engine, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from attrs import field, frozen

__all__ = [
    "EngineInfo",
    "EngineLoad",
    "EventSource",
    "FinishReason",
    "GenerateRequest",
    "HandoverInfo",
    "KvExchange",
    "KvRetention",
    "RequestOutcome",
    "RequestSummary",
    "Role",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprob",
    "WorkerRecord",
]


class FinishReason(StrEnum):
    """Why an engine stopped a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Role(StrEnum):
    """Which phase of requests a worker is sent. Routing's matter: engines can do both."""

    BOTH = "both"
    """Whole requests, and the decode of those that are prefilled elsewhere."""
    PREFILL = "prefill"
    DECODE = "decode"
    """Decode, and whole requests that are not worth a hand-over."""


@frozen
class SamplingParams:
    """How the next tokens are chosen. Defaults mean "off"; names are the field's usual ones."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(factory=dict)
    top_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only. n: beside it the n likeliest."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@frozen(kw_only=True)
class KvRetention:
    """How long the KV blocks of a prompt's beginning are worth keeping, if the engine can."""

    priority: int = 0
    """Blocks of a lower priority are evicted first."""
    ttl_s: float | None = None
    """So long after its last use a block is the first to be evicted."""
    pinned: bool = False
    """Not evicted to make room before ``ttl_s`` has passed."""
    tokens: int | None = None
    """Holds for full blocks among so many first tokens; None: for all of the prompt."""


@frozen
class GenerateRequest:
    """One prompt for one engine, in tokens."""

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    lora_name: str | None = None
    cache_salt: str | None = None
    """Requests share cached KV blocks only with requests of the same salt."""
    priority: int = 0
    """Lower is served earlier."""
    data_parallel_rank: int | None = None
    generated_prefix: int = 0
    """How many of the last ``token_ids`` are output already: another worker began this answer.

    The engine goes on as if it had generated them itself: lengths, penalties, stop conditions and
    the places in a seeded random sequence count them; its deltas bring only what comes after.
    """
    handover: Mapping[str, Any] | None = None
    """Set when this is one leg of a request whose prefill and decode are apart.

    The words are the engine's own; its ``HandoverStyle`` makes them.
    """
    retention: tuple[KvRetention, ...] = ()
    """What to keep longer than other blocks; the strongest holds where several do."""
    extra: Mapping[str, Any] = field(factory=dict)
    """Engine-specific parameters, relayed as they are (guided decoding)."""
    traceparent: str | None = None
    """W3C trace context of the span that this request is, for engines that trace, too."""


@frozen
class TokenLogprob:
    """Natural-log probability of one generated token, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest alternatives as (token id, logprob), best first."""


@frozen
class TokenDelta:
    """What one engine tick added to one request. The last delta carries ``finish_reason``."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry a token in ``token_ids`` when asked for, otherwise empty."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the request, if one did."""
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache; set on one delta: the first that can tell."""
    handover: Mapping[str, Any] | None = None
    """On a prefill leg's last delta: what the decode leg must know, relayed as it is."""
    error: str | None = None
    """Set with ``FinishReason.ERROR``: what went wrong."""
    handover_failed: bool = False
    """With ``FinishReason.ERROR``: the KV did not arrive; another way may still serve it.

    On a prefill leg of a concurrent style: the decode side has let go of it, and says why itself.
    """


@frozen
class EventSource:
    """Where an engine publishes its KV events (ZMQ)."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    further_ranks: tuple[EventSource, ...] = ()
    """Those of data-parallel ranks 1, 2, ...; where it is empty their ports are counted up."""


@frozen
class HandoverInfo:
    """What a worker needs to have in common with another for one's KV to be the other's."""

    protocol: str
    """How the bytes go; both sides need the same."""
    identity: str
    """Everything that decides a token's KV bytes but the sizes below: model, revision, dtype."""
    block_size: int
    """Tokens in one block."""
    token_bytes: int
    """KV bytes of one token, in all layers and ranks."""
    tensor_parallel_size: int = 1
    address: str | None = None
    """Where the other side asks, where that is not the worker's own address."""


@frozen
class KvExchange:
    """That a worker reads KV blocks out of the memory of others of the same model."""

    address: str | None = None
    """Where the others read its own; None: it lends nothing."""


@frozen
class EngineInfo:
    """What an engine says of itself when a client connects."""

    kind: str
    version: str
    model: str
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    block_size: int
    """Tokens in one KV block."""
    kv_capacity_blocks: int
    """What the KV memory of all data-parallel ranks together holds; 0 when it is not known."""
    data_parallel_size: int = 1
    kv_events: EventSource | None = None
    pid: int | None = None
    continues_answers: bool = False
    """Whether it understands ``GenerateRequest.generated_prefix``."""
    forwards: bool = False
    """Whether it takes clients' HTTP requests as they are; see ``EngineClient.forward``."""
    handover: HandoverInfo | None = None
    """None when its prefill and decode cannot be apart."""
    computes_prompts: bool = True
    """Whether it can serve a request alone. If not, a prefill worker has to compute the prompt."""
    kv_exchange: KvExchange | None = None
    """None when it shares no KV blocks with other workers."""

    def rank_capacity_blocks(self, block_size: int) -> int:
        """One data-parallel rank's, in blocks of ``block_size`` tokens; 0 when it is not known."""
        return self.kv_capacity_blocks * self.block_size // (self.data_parallel_size * block_size)


@frozen
class EngineLoad:
    """An engine's own account of what it is doing now."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    """Blocks held by requests; blocks that are only cached do not count."""
    kv_cached_blocks: int = 0
    """Blocks that hold a reusable prefix and no request needs."""
    kv_capacity_blocks: int = 0
    draining: bool = False


@frozen
class WorkerRecord:
    """One live worker as the registry knows it."""

    worker_id: str
    engine: str
    """The name of the `engines` entry of the configuration that it was started from."""
    kind: str
    model: str
    address: str
    info: EngineInfo
    draining: bool = False
    role: Role = Role.BOTH


@frozen
class RequestSummary:
    """What observing hooks learn of a request; the prompt itself is not among it."""

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    session_id: str | None = None
    priority: int = 0


@frozen
class RequestOutcome:
    """How one engine request ended."""

    worker_id: str
    finish_reason: FinishReason
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine found in its KV cache."""
    duration_s: float
