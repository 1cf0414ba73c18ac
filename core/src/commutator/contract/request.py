"""Requests: what an engine gets and returns, and what plugins learn about a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from attrs import field, frozen

__all__ = [
    "DIGEST",
    "MAX_SESSION_CHARS",
    "UNKNOWN_CALLER",
    "AdapterIdentity",
    "Caller",
    "Constraint",
    "ConstraintKind",
    "FinishReason",
    "GenerateRequest",
    "KvRetention",
    "MediaIdentity",
    "Pooling",
    "RequestOutcome",
    "RequestSummary",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprob",
]


class FinishReason(StrEnum):
    """Why an engine stopped a request."""

    STOP = "stop"
    """The model's end token, a stop token or a stop string came; of the last two,
    ``TokenDelta.stop_reason`` says which."""
    LENGTH = "length"
    """The answer reached ``max_tokens`` or the model's longest sequence."""
    TOOL_CALLS = "tool_calls"
    """The answer ends with calls of tools, whose results the model waits for."""
    CONTENT_FILTER = "content_filter"
    """The engine withheld the rest of the answer, or all of it: a refusal that is not the
    model's own text."""
    ABORT = "abort"
    """The request was cancelled: its stream was closed, or the engine gave it up, before the answer
    was complete."""
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


ConstraintKind = Literal[
    "json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "lark"
]
"""What an answer may be made to follow; ``EngineInfo.constraints`` names those of an engine."""

_JSON_KINDS = ("json_schema", "structural_tag")


@frozen(kw_only=True)
class Constraint:
    """What the text of an answer must follow. Raises ValueError when the value does not fit.

    An engine enforces all of it or refuses the request.
    """

    kind: ConstraintKind
    """How to read ``value``."""
    value: str | tuple[str, ...] = ""
    """A JSON schema or a structural tag as JSON text, with keys in the order in which they are to
    be generated; a regular expression for the whole text; a grammar, in the engine's notation, or
    for "lark" in llguidance's, with special tokens by id; the alternatives of a choice, at least
    one; empty for a ``json_object``, which is any."""
    after: tuple[int, ...] = ()
    """The token ids, in their order, after which it begins, such as the end of reasoning; empty: it
    begins with the answer."""
    whitespace: str | None = None
    """A regular expression for what may stand between the parts of JSON; empty: nothing. None:
    whatever the engine allows."""

    def __attrs_post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"constraint {self.kind}: {problem}")

    def _problem(self) -> str | None:
        if self.kind == "choice":
            if not isinstance(self.value, tuple) or not self.value or "" in self.value:
                return "expected at least one alternative, none of them empty"
        elif not isinstance(self.value, str):
            return "expected one text"
        elif bool(self.value) == (self.kind == "json_object"):
            return "it takes no value" if self.value else "its value is empty"
        elif self.kind in _JSON_KINDS:
            try:
                json.loads(self.value)
            except (ValueError, RecursionError) as error:
                return f"its value is no JSON: {error}"
        if self.whitespace is not None and self.kind not in ("json_object", *_JSON_KINDS):
            return "white space is for JSON only"
        return None


DIGEST = re.compile("[0-9a-f]{64}")
"""What the digests of adapters and media are: SHA-256 in lower-case hex digits."""


def _is_a_digest(_: Any, _field: Any, value: str) -> None:
    if not DIGEST.fullmatch(value):
        raise ValueError(f"digest: expected SHA-256 in 64 lower-case hex digits, got {value!r:.80}")


@frozen(kw_only=True)
class AdapterIdentity:
    """An adapter of a model, by its content. Two are equal if their contents are."""

    name: str = field(eq=False)
    """For people, and in messages; nothing is found by it."""
    digest: str = field(validator=_is_a_digest)
    """SHA-256 of the adapter's weights and settings, in 64 lower-case hex digits. Engines know the
    adapter by it: a server that has its own names, such as vLLM, by it as name."""
    source: str | None = field(default=None, eq=False)
    """The folder that an engine without it loads it from; None: it can use only what it has."""

    def __str__(self) -> str:
        return f'"{self.name}" ({self.digest[:12]})'


@frozen(kw_only=True)
class MediaIdentity:
    """A picture, a sound or a film in a prompt, by its content, which is not part of a request."""

    kind: str
    """"image", "audio", "video", or another kind that ``EngineInfo.media`` names."""
    digest: str = field(validator=_is_a_digest)
    """SHA-256 of what the model sees of it, in 64 lower-case hex digits."""
    start: int
    """The position in ``GenerateRequest.token_ids`` of the first token that stands for it."""
    tokens: int
    """How many tokens stand for it, at least 1."""

    def __attrs_post_init__(self) -> None:
        if self.start < 0 or self.tokens < 1:
            raise ValueError(f"media: no place in a prompt: {self.tokens} tokens at {self.start}")


@frozen(kw_only=True)
class Pooling:
    """What is asked of inputs to which nothing is generated: vectors, scores or classes."""

    operation: str
    """``Operation.EMBED``, ``TOKEN_EMBED``, ``SCORE`` or ``CLASSIFY``."""
    lengths: tuple[int, ...]
    """The tokens of each input, at least 1; they follow one another in the ``token_ids``."""
    firsts: tuple[int, ...] = ()
    """Where inputs are pairs of texts, the tokens of each that belong to its first text."""
    dimensions: int | None = None
    """Vectors are cut to this length, then normalized; None: they stay whole."""
    activation: bool = True
    """Whether vectors are normalized, and scores squashed, as the model's own pipeline does."""


MAX_SESSION_CHARS = 256
"""Longest ``GenerateRequest.session``."""


def _is_a_session(_: Any, _field: Any, value: str | None) -> None:
    if value is not None and not 0 < len(value) <= MAX_SESSION_CHARS:
        raise ValueError(f"session: expected 1 to {MAX_SESSION_CHARS} characters, got {len(value)}")


@frozen(kw_only=True)
class GenerateRequest:
    """One prompt for one engine, in tokens.

    An engine that cannot do what a field asks refuses the request, and names it.
    """

    request_id: str
    """Unique among the requests that the worker has in flight."""
    token_ids: Sequence[int]
    """The prompt, at least one token; with ``generated_prefix`` also the answer so far.

    From front doors and over the token API, an ``array`` of unsigned 32-bit integers.
    """
    sampling: SamplingParams
    """How the answer is generated."""
    adapter: AdapterIdentity | None = None
    """The adapter to use; None: the model itself."""
    constraint: Constraint | None = None
    """What the answer must follow; None: nothing."""
    media: tuple[MediaIdentity, ...] = ()
    """What is in the prompt beside text, in the order of its positions, without overlap."""
    session: str | None = field(default=None, validator=_is_a_session)
    """Names the conversation, so that an engine may keep its KV for the next turn: opaque, unique
    in the deployment, up to ``MAX_SESSION_CHARS``. None: it is not known. An engine may do
    without: the answer is the same."""
    prompt_logprobs: int | None = None
    """None: none. 0: the log probability of each token of the prompt, given those before it. n:
    also those of the n likeliest tokens there. All of the prompt is computed, none of its KV read
    from caches. A request with a ``generated_prefix`` has none."""
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
    pooling: Pooling | None = None
    """What to do instead of generating; None: generate. Only tokens and priority count then."""
    retention: tuple[KvRetention, ...] = ()
    """Blocks to retain longer than others; the strongest applies where several cover a block."""
    options: Mapping[str, Any] = field(factory=dict)
    """Parameters that only some engines have, by the names in ``EngineInfo.request_options``, which
    says what is legal: checked before an engine gets them."""
    traceparent: str | None = None
    """W3C trace context of this request's span, for engines that trace; None: no trace."""

    @property
    def is_plain(self) -> bool:
        """Whether every engine can do what it asks; if not, ``EngineInfo.unmet`` says which can."""
        return (
            self.constraint is None
            and self.adapter is None
            and not self.media
            and not self.options
            and self.prompt_logprobs is None
            and self.pooling is None
        )

    @property
    def adapter_digest(self) -> str | None:
        """What keeps the KV of its adapter apart; None: the model itself."""
        return None if self.adapter is None else self.adapter.digest


@frozen(kw_only=True)
class TokenLogprob:
    """Natural-log probability of one token, before temperature and filters."""

    token_id: int
    """The token."""
    logprob: float
    """Its natural logarithm, 0 or less."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens as (token id, logprob), best first; whether the token is among them is
    left to its probability."""
    rank: int | None = None
    """Its place among all tokens, 1 for the likeliest; None: not known."""


@frozen(kw_only=True)
class TokenDelta:
    """What one step of the engine added to an answer. The last delta has a ``finish_reason``."""

    token_ids: tuple[int, ...] = ()
    """The new tokens, possibly none."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of ``token_ids`` where the request wants logprobs, otherwise empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Where the request wants them, on the first delta with a token: one entry for each token of
    the prompt but the first."""
    finish_reason: FinishReason | None = None
    """Why the answer ended; None on every delta but the last."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the request, if one did."""
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache; set on one delta, the first with which it is known."""
    handover: Mapping[str, Any] | None = None
    """On the last delta of a prefill: the ``handed`` of ``HandoverStyle.decode_request``."""
    vectors: bytes = b""
    """Of a ``Pooling``, on its only delta: little-endian float32, a row of equal length for each
    input, or for each token of a ``TOKEN_EMBED``."""
    error: str | None = None
    """Set with ``FinishReason.ERROR``: what went wrong."""
    refused: bool = False
    """With ``FinishReason.ERROR``: the fault is the request's, which only the answer has shown."""
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
