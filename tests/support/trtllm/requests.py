"""Requests as TensorRT-LLM's endpoints take them. What they do not know, they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commutator.contract.request import GenerateRequest, SamplingParams

__all__ = ["Refused", "read_request"]

_SAMPLING = {
    *("model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "n", "user"),
    *("stream", "stream_options", "add_special_tokens", "response_format"),
    "disaggregated_params",
}
_COMPLETION = _SAMPLING | {"prompt", "detokenize"}
_CHAT = _SAMPLING | {
    *("messages", "prompt_token_ids", "cache_salt", "max_completion_tokens", "top_logprobs"),
    *("tools", "tool_choice"),
}
_DISAGGREGATED = {
    *("request_type", "first_gen_tokens", "first_gen_log_probs", "first_gen_logits"),
    *("ctx_request_id", "encoded_opaque_state", "draft_tokens", "disagg_request_id"),
    *("ctx_dp_rank", "ctx_info_endpoint", "schedule_style"),
}


class Refused(Exception):  # noqa: N818 - an answer, no failure
    """The request is answered 400 with this text."""


def read_request(
    body: Mapping[str, Any], name: str, *, chat: bool, tokenize: Callable[[Any], list[int]]
) -> GenerateRequest:
    """Raises Refused. ``tokenize`` gets a prompt as text, or a chat's messages."""
    if unknown := set(body) - (_CHAT if chat else _COMPLETION):
        raise Refused(f"Extra inputs are not permitted: {sorted(unknown)}")
    if body.get("stream_options") and not body.get("stream"):
        raise Refused("Stream options can only be defined when stream is true.")
    words = body.get("disaggregated_params")
    if words is not None and (unknown := set(words) - _DISAGGREGATED):
        raise Refused(f"Extra inputs are not permitted: {sorted(unknown)}")
    if any(abs(bias) > 100 for bias in (body.get("logit_bias") or {}).values()):
        raise Refused("logit_bias values must be in [-100, 100]")
    given = (body.get("prompt_token_ids") or body["messages"]) if chat else body["prompt"]
    as_ids = bool(given) and isinstance(given[0], int)
    prompt = given if as_ids else tokenize(given)
    return GenerateRequest(
        request_id=name,
        token_ids=prompt,
        sampling=_sampling(body),
        cache_salt=body.get("cache_salt"),
    )


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    stop = body.get("stop") or ()
    longest = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    return SamplingParams(
        max_tokens=longest,
        min_tokens=body.get("min_tokens", 0),
        temperature=1.0 if body.get("temperature") is None else body["temperature"],
        top_p=1.0 if body.get("top_p") is None else body["top_p"],
        top_k=body.get("top_k", 0),
        min_p=body.get("min_p", 0.0),
        seed=body.get("seed"),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        presence_penalty=body.get("presence_penalty", 0.0),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        logit_bias={int(token): bias for token, bias in (body.get("logit_bias") or {}).items()},
        top_logprobs=0 if body.get("logprobs") else None,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        ignore_eos=body.get("ignore_eos", False),
    )
