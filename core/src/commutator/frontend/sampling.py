"""From a validated request to sampling parameters: what no single field can tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from commutator.errors import RequestError
from commutator.frontend.choice import ChoiceRules
from commutator.frontend.requests import ChatRequest, CompletionRequest, GenerationRequest
from commutator.text.model import TextModel
from commutator.types import SamplingParams

__all__ = ["choice_rules", "max_tokens_of", "sampling_params"]

_COMPLETION_MAX_TOKENS = 16
_MAX_STOP_CHARACTERS = 512


def max_tokens_of(request: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int:
    """The longest answer allowed. Raises RequestError with both lengths when it cannot fit."""
    left = max_model_len - prompt_tokens
    is_chat = isinstance(request, ChatRequest)
    if left < 1:
        raise RequestError(
            f"this model's context is {max_model_len} tokens and the prompt has {prompt_tokens}: "
            "no room is left for an answer",
            "messages" if is_chat else "prompt",
            "context_length_exceeded",
        )
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        return left if is_chat else min(left, _COMPLETION_MAX_TOKENS)
    if asked > left:
        raise RequestError(
            f"this model's context is {max_model_len} tokens; the prompt has {prompt_tokens} and "
            f"{param} asks for {asked} more",
            param,
            "context_length_exceeded",
        )
    return asked


def choice_rules(request: GenerationRequest, model: TextModel) -> ChoiceRules:
    """When and how the frontend itself ends an answer. Raises RequestError."""
    return ChoiceRules(
        stop=_stop_strings(request),
        end_ids=model.eos_ids | frozenset(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def sampling_params(
    request: GenerationRequest, rules: ChoiceRules, model: TextModel, max_tokens: int
) -> SamplingParams:
    """The engine's part. Raises RequestError."""
    if rules.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: expected at most {max_tokens}, the longest answer allowed, "
            f"got {rules.min_tokens}",
            "min_tokens",
        )
    # The model's files may name more ends than the engine knows.
    ends = () if request.ignore_eos else model.eos_ids
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rules.min_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, model.vocab_size),
        top_logprobs=_top_logprobs(request),
        stop=rules.stop,
        stop_token_ids=tuple(sorted({*ends, *(request.stop_token_ids or ())})),
        ignore_eos=bool(request.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    stop = request.stop
    strings = (stop,) if isinstance(stop, str) else stop or ()
    for string in strings:
        if not string or len(string) > _MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop: expected strings of 1 to {_MAX_STOP_CHARACTERS} characters, "
                f"got one of {len(string)}",
                "stop",
            )
    return strings


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    by_id = {}
    for key, bias in biases.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1  # noqa: PLR2004
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: expected token ids below {vocab_size} as keys, got {key[:40]!r}",
                "logit_bias",
            )
        by_id[token_id] = bias
    return by_id


def _top_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
    return None
