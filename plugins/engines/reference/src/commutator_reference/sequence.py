"""One request in the engine: what it may ask for, its tokens and blocks, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many

from attrs import define, evolve, field, frozen

from commutator import FinishReason, GenerateRequest, RetentionHints, SamplingParams
from commutator.contract.block import CacheIdentity, retention_hints
from commutator.errors import RequestError
from commutator_reference.block_pool import ANONYMOUS, BlockIdentity

__all__ = ["Decode", "Sequence", "Stop", "find_stop", "stop_ids", "validate_request"]

Decode = Callable[[Many[int]], str]
"""Text of some tokens; a partial character may decode to a replacement character."""

_SPARE_TOKENS = 8
"""Tokens decoded beyond a stop string's length, because some tokens add no text."""


@define(eq=False)
class Sequence:
    """Prompt and output tokens with the blocks that hold their KV.

    The KV of the newest token is computed in the step that samples the next one, so a sequence
    that decodes has exactly one token more than ``computed``.
    """

    key: int
    request: GenerateRequest
    arrival: int
    tokens: list[int]
    """The prompt, then the output."""
    prompt_length: int
    """The prompt's length, without tokens that another worker generated."""
    seed: int
    namespace: CacheIdentity
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    blocks: list[int] = field(factory=list)
    identities: list[BlockIdentity] = field(factory=list)
    """Identities of the leading full blocks computed so far."""
    registered: int = 0
    """Leading blocks that are in the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    tiers_asked: bool = False
    """Whether its blocks in storage tiers were loaded, or need not be."""
    started: bool = False
    """Whether a delta has been emitted."""

    @classmethod
    def start(
        cls,
        key: int,
        request: GenerateRequest,
        arrival: int,
        seed: int,
        base: CacheIdentity = ANONYMOUS,
    ) -> Sequence:
        """A sequence that has not been scheduled yet."""
        return cls(
            key,
            request,
            arrival,
            tokens=list(request.token_ids),
            prompt_length=len(request.token_ids) - request.generated_prefix,
            seed=seed,
            namespace=evolve(base, adapter=request.adapter_digest, cache_salt=request.cache_salt),
        )

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def output_length(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower priority value first, then first come, first served."""
        return self.request.priority, self.arrival

    def facts(self, index: int, block_size: int) -> RetentionHints:
        """Retention hints of full block ``index``: its depth, and the client's wishes."""
        request = self.request
        return retention_hints(
            index, block_size, self.prompt_length, request.cache_salt, request.retention
        )

    def identity(self, index: int, block_size: int) -> BlockIdentity:
        """The identity of full block ``index``; computed once, survives preemption."""
        while len(self.identities) <= index:
            start = len(self.identities) * block_size
            token_ids = self.tokens[start : start + block_size]
            if self.identities:
                self.identities.append(self.identities[-1].child(token_ids))
            else:
                self.identities.append(BlockIdentity.first(self.namespace, token_ids))
        return self.identities[index]

    def reusable(self, block_size: int) -> list[BlockIdentity]:
        """Identities of the full blocks that need not be computed if they are cached somewhere.

        The last token is always computed: the next one is sampled from its logits.
        """
        count = (len(self.tokens) - 1) // block_size
        if count > len(self.identities):
            self.identity(count - 1, block_size)
        return self.identities[:count]


def validate_request(
    request: GenerateRequest, *, vocab_size: int, max_model_len: int, can_decode: bool
) -> None:
    """Raise RequestError for the first thing wrong with ``request``.

    ``can_decode`` says whether the engine can turn tokens into text, which stop strings need.
    """
    tokens, sampling = request.token_ids, request.sampling
    if not tokens:
        raise RequestError("the prompt has no tokens", "prompt")
    if len(tokens) + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with at least one to generate, this engine "
            f"takes {max_model_len} in all",
            "prompt",
            "context_length_exceeded",
        )
    ids = {
        "prompt": tokens,
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for param, values in ids.items():
        # A model has no row for other ids, and indexing one would fail the whole batch.
        wrong = next((token for token in values if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not between 0 and {vocab_size - 1}", param)
    for param, right, problem in _sampling_rules(sampling, vocab_size):
        if not right:
            raise RequestError(f"{param} must be {problem}", param)
    done = request.generated_prefix
    if not 0 <= done < min(len(tokens), sampling.max_tokens):
        raise RequestError(
            f"generated_prefix is {done}: expected less than max_tokens ({sampling.max_tokens}), "
            f"and less than the {len(tokens)} tokens that it is the end of",
            "generated_prefix",
        )
    for param, problem in _unsupported(request, can_decode=can_decode):
        raise RequestError(f"the reference engine {problem}", param)


def _sampling_rules(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, bool, str]]:
    s = sampling
    yield "max_tokens", s.max_tokens >= 1, "at least 1"
    yield "min_tokens", 0 <= s.min_tokens <= s.max_tokens, "from 0 to max_tokens"
    yield "temperature", 0 <= s.temperature < math.inf, "a finite number of at least 0"
    yield "top_p", 0 < s.top_p <= 1, "above 0 and at most 1"
    yield "top_k", s.top_k >= 0, "at least 0"
    yield "min_p", 0 <= s.min_p <= 1, "from 0 to 1"
    yield "repetition_penalty", 0 < s.repetition_penalty < math.inf, "a finite number above 0"
    for param in ("presence_penalty", "frequency_penalty"):
        yield param, math.isfinite(getattr(s, param)), "a finite number"
    yield "logit_bias", all(map(math.isfinite, s.logit_bias.values())), "finite numbers"
    top = 0 if s.top_logprobs is None else s.top_logprobs
    yield "top_logprobs", 0 <= top <= vocab_size, f"from 0 to {vocab_size}"
    yield "stop", "" not in s.stop, "strings that are not empty"


def _unsupported(request: GenerateRequest, *, can_decode: bool) -> Iterator[tuple[str, str]]:
    if request.sampling.stop and not can_decode:
        yield "stop", "was started without a tokenizer, which stop strings need; use stop_token_ids"
    if request.data_parallel_rank not in {None, 0}:
        yield "data_parallel_rank", f"has rank 0 only, not {request.data_parallel_rank}"


@frozen
class Stop:
    """Why a request ends with its newest token."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


def stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The tokens that end this request."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def find_stop(
    sequence: Sequence,
    eos_token_ids: Collection[int],
    max_model_len: int,
    decode: Decode | None,
) -> Stop | None:
    """Whether the newest token ends the request. Before ``min_tokens`` nothing but length does.

    The ending token stays in the output; ``stop_reason`` names a stop id or string, and is None
    for the end-of-sequence token, as in vLLM.
    """
    params, token = sequence.sampling, sequence.tokens[-1]
    if sequence.output_length >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token in params.stop_token_ids:
            return Stop(FinishReason.STOP, token)
        if params.stop and decode is not None:
            found = _completed_stop_string(sequence, params.stop, decode)
            if found is not None:
                return Stop(FinishReason.STOP, found)
    is_full = len(sequence.tokens) >= max_model_len
    if is_full or sequence.output_length >= params.max_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def _completed_stop_string(sequence: Sequence, stop: tuple[str, ...], decode: Decode) -> str | None:
    """The first of the stop strings that the newest token completed."""
    tail, text = _tail(sequence, max(map(len, stop)), decode)
    candidates = [string for string in stop if string in text]
    if not candidates:
        return None
    # It may have been complete before min_tokens were reached.
    before = decode(tail[:-1])
    return next((s for s in candidates if text.count(s) > before.count(s)), None)


def _tail(sequence: Sequence, characters: int, decode: Decode) -> tuple[list[int], str]:
    """The last output tokens, enough for ``characters`` characters of text, and that text."""
    length = characters + _SPARE_TOKENS
    while True:
        start = max(sequence.prompt_length, len(sequence.tokens) - length)
        tail = sequence.tokens[start:]
        text = decode(tail)
        if len(text) >= characters + _SPARE_TOKENS or start == sequence.prompt_length:
            return tail, text
        length *= 2
