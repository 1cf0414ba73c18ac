"""Refuses requests that can never be served, naming the parameter and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterator

from commutator.errors import RequestError
from commutator.types import GenerateRequest, SamplingParams

__all__ = ["validate_request"]


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
    if request.lora_name is not None:
        yield "model", f'has no LoRA adapters, so it cannot serve "{request.lora_name}"'
    if request.data_parallel_rank not in {None, 0}:
        yield "data_parallel_rank", f"has rank 0 only, not {request.data_parallel_rank}"
    for name in request.extra:
        yield name, f'does not know the parameter "{name}"'
