"""Our request in the words of vLLM's two endpoints that take token ids. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commutator.types import GenerateRequest

__all__ = ["COMPLETIONS", "GENERATE", "hands_over", "request_body", "request_headers"]

GENERATE = "/inference/v1/generate"
"""Tokens in, tokens out; offered with `--enable-scale-out`. The cheaper one for vLLM."""
COMPLETIONS = "/v1/completions"
"""Offered always."""


def request_body(
    path: str, request: GenerateRequest, model: str, *, use_priority: bool
) -> dict[str, Any]:
    """The JSON body for ``path``, one of the two above.

    Every sampling parameter is written out, so that a model's generation_config.json changes none.
    ``request.extra`` holds further ones of vLLM's own (`structured_outputs`, `bad_words`, ...).
    """
    body: dict[str, Any] = {"model": request.lora_name or model}
    if hands_over(request.handover):
        # Only a whole answer carries the parameters for the decode leg.
        body["stream"] = False
    else:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if use_priority and request.priority:
        body["priority"] = request.priority
    if request.handover is not None:
        body["kv_transfer_params"] = dict(request.handover)
    sampling = _sampling(request)
    if path == GENERATE:
        # Text is the front door's; vLLM needs it only to look for stop strings.
        sampling["detokenize"] = bool(request.sampling.stop)
        return {**body, "token_ids": list(request.token_ids), "sampling_params": sampling}
    return {
        **body,
        **sampling,
        "prompt": list(request.token_ids),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def hands_over(handover: Mapping[str, Any] | None) -> bool:
    """Whether this is the prefill leg of a request."""
    return bool(handover and handover.get("do_remote_decode"))


def request_headers(request: GenerateRequest) -> dict[str, str]:
    """What vLLM takes from headers."""
    headers = {"X-Request-Id": request.request_id}
    if request.data_parallel_rank is not None:
        headers["X-data-parallel-rank"] = str(request.data_parallel_rank)
    if request.traceparent is not None:
        headers["traceparent"] = request.traceparent
    return headers


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    """An engine that knows only prompts: of a continued answer the limits are what is left.

    Presence and frequency penalties then see only what comes from here on, and a seed draws
    from its beginning; the repetition penalty counts prompts as well, so it is the same.
    """
    asked, begun = request.sampling, request.generated_prefix
    body: dict[str, Any] = {
        "max_tokens": asked.max_tokens - begun,
        "min_tokens": max(0, asked.min_tokens - begun),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": list(asked.stop_token_ids),
    }
    if asked.seed is not None:
        body["seed"] = asked.seed
    if asked.top_logprobs is not None:
        body["logprobs"] = asked.top_logprobs
    if asked.stop:
        body["stop"] = list(asked.stop)
    if asked.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    return {**body, **request.extra}
