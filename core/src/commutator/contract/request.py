"""Requests: what an engine gets and returns, and what plugins learn about a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from attrs import field, frozen

__all__ = [
    "UNKNOWN_CALLER",
    "Caller",
    "FinishReason",
    "GenerateRequest",
    "KvRetention",
    "RequestOutcome",
    "RequestSummary",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprob",
]


class FinishReason(StrEnum):
    """Why an engine stopped a request."""

    STOP = "stop"
    """The model's end token, a stop token or a stop string came."""
    LENGTH = "length"
    """The answer reached ``max_tokens`` or the model's longest sequence."""
    ABORT = "abort"
    """The stream was closed before the answer was complete."""
    ERROR = "error"
    """The engine failed; ``TokenDelta.error`` says how."""


@frozen(kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen. The default of each penalty and filter is "off"."""

    max_tokens: int = 16
    """Longest answer in tokens, at least 1."""
    min_tokens: int = 0
    """Nothing ends the answer before this many tokens; 0 to ``max_tokens``."""
    temperature: float = 1.0
    """Divides the logits, 0 or more; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this probability, above 0; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens, 0 or more; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest, 0 to 1."""
    seed: int | None = None
    """Makes sampling repeatable, a signed 64-bit integer; None: a random one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and answer less likely; must be above 0."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the answer contains it."""
    logit_bias: Mapping[int, float] = field(factory=dict)
    """What is added to the logit of each token id."""
    top_logprobs: int | None = None
    """None: no logprobs. 0: those of the chosen tokens. n: also those of the n likeliest tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, none of them empty. An engine without a tokenizer refuses
    them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Whether the model's end tokens do not end the answer."""


@frozen(kw_only=True)
class KvRetention:
    """How long an engine with storage tiers retains the KV blocks of a prompt's beginning."""

    priority: int = 0
    """-10 to 10; blocks of a lower priority are evicted first."""
    ttl_s: float | None = None
    """Seconds after its last use from which a block is evicted before others; None: no limit."""
    pinned: bool = False
    """Whether blocks are not evicted to make room before ``ttl_s`` has passed; without: never."""
    tokens: int | None = None
    """Applies to the full blocks within this number of first tokens; None: within the prompt."""


@frozen(kw_only=True)
class GenerateRequest:
    """One prompt for one engine, in tokens."""

    request_id: str
    """Unique among the requests that the worker has in flight."""
    token_ids: Sequence[int]
    """The prompt, at least one token; with ``generated_prefix`` also the answer so far.

    From front doors and over the token API, an ``array`` of unsigned 32-bit integers.
    """
    sampling: SamplingParams
    """How the answer is generated."""
    lora_name: str | None = None
    """The adapter to use; None: the model itself."""
    cache_salt: str | None = None
    """Requests share cached KV blocks only with requests of the same salt."""
    priority: int = 0
    """Lower is served earlier."""
    data_parallel_rank: int | None = None
    """The rank that must serve it, from 0; None: the engine chooses."""
    generated_prefix: int = 0
    """Number of the last ``token_ids`` that belong to the answer: another worker generated them.

    The engine continues as if it had generated them: lengths, penalties, stop conditions and the
    positions in a seeded random sequence count them. Its deltas hold only the tokens after them.
    """
    handover: Mapping[str, Any] | None = None
    """Set when this is the prefill or the decode of a disaggregated request.

    The engine's ``HandoverStyle`` makes it; no other code reads it.
    """
    retention: tuple[KvRetention, ...] = ()
    """Blocks to retain longer than others; the strongest applies where several cover a block."""
    extra: Mapping[str, Any] = field(factory=dict)
    """Engine-specific parameters, relayed as they are (guided decoding)."""
    traceparent: str | None = None
    """W3C trace context of this request's span, for engines that trace; None: no trace."""


@frozen(kw_only=True)
class TokenLogprob:
    """Natural-log probability of one generated token, before temperature and filters."""

    token_id: int
    """The generated token."""
    logprob: float
    """Its natural logarithm, 0 or less."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest alternatives as (token id, logprob), best first."""


@frozen(kw_only=True)
class TokenDelta:
    """What one step of the engine added to an answer. The last delta has a ``finish_reason``."""

    token_ids: tuple[int, ...] = ()
    """The new tokens, possibly none."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of ``token_ids`` where the request wants logprobs, otherwise empty."""
    finish_reason: FinishReason | None = None
    """Why the answer ended; None on every delta but the last."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the request, if one did."""
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache; set on one delta, the first with which it is known."""
    handover: Mapping[str, Any] | None = None
    """On the last delta of a prefill: the ``handed`` of ``HandoverStyle.decode_request``."""
    error: str | None = None
    """Set with ``FinishReason.ERROR``: what went wrong."""
    handover_failed: bool = False
    """With ``FinishReason.ERROR``: the KV did not arrive; a further try may succeed.

    On a prefill in a concurrent style: the decode side gave it up, and its own error says why.
    """


@frozen(kw_only=True)
class Caller:
    """The client of a request, as far as known.

    Clients choose the values, all but those of the principal: do not trust them.
    """

    user: str | None = None
    """The body's field `user`."""
    session_id: str | None = None
    """The body's `session_id`, or `prompt_cache_key`: names a conversation."""
    principal: str | None = None
    """The name of the principal that sent it; None where nobody is asked who they are."""
    weight: float = 1.0
    """The principal's share of busy workers, in proportion to others' weights; above 0."""
    headers: Mapping[str, str] = field(factory=dict)
    """The headers that `frontend.forward_headers` names, as far as they were sent; lower case."""


UNKNOWN_CALLER = Caller()
"""A caller with no known value."""


@frozen(kw_only=True)
class RequestSummary:
    """What observers learn about a request; the prompt is not part of it."""

    request_id: str
    """Names the request in logs and headers. Each of several answers has an id: ID-0, ID-1."""
    model: str
    """The name that the client gave."""
    prompt_tokens: int
    """Length of the prompt."""
    max_tokens: int
    """Longest answer in tokens."""
    priority: int = 0
    """Lower is served earlier."""
    user: str | None = None
    """The body's field `user`; None where the client gave none."""
    session_id: str | None = None
    """Names a conversation; None where the client gave none."""
    principal: str | None = None
    """The name of the principal that sent it; None where nobody is asked who they are."""
    weight: float = 1.0
    """The principal's share of busy workers, in proportion to others' weights; above 0."""
    headers: Mapping[str, str] = field(factory=dict)
    """The headers that `frontend.forward_headers` names, as far as they were sent; lower case."""


@frozen(kw_only=True)
class RequestOutcome:
    """How a request that an engine finished ended."""

    worker_id: str
    """The worker that sent the last token."""
    finish_reason: FinishReason
    """Why the answer ended."""
    generated_tokens: int
    """Tokens of the answer, from all workers that served it; 0 for a forwarded request."""
    cached_tokens: int
    """Prompt tokens that the first worker found in its KV cache."""
    recomputed_tokens: int = 0
    """Tokens that later workers computed again because their KV was lost with a worker."""
    duration_s: float
    """Seconds from the request's arrival at routing to its last token; time in queues counts."""
