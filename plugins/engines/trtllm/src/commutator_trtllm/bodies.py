"""Our request in the words of TensorRT-LLM's /v1/completions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commutator.errors import RequestError
from commutator.types import GenerateRequest

__all__ = ["COMPLETIONS", "CONTEXT_ONLY", "hands_over", "request_body", "request_headers"]

COMPLETIONS = "/v1/completions"
"""The only endpoint that both takes token ids and answers with them."""
CONTEXT_ONLY = "context_only"


def request_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The JSON body. ``request.extra`` holds further parameters of TensorRT-LLM's own.

    Every sampling parameter is written out. An answer that another began is a prompt, of which the
    limits are what is left. Raises RequestError for what the endpoint cannot do.
    """
    for param, problem in _unsupported(request):
        raise RequestError(problem, param)
    asked, begun = request.sampling, request.generated_prefix
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
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
        "include_stop_str_in_output": True,  # text is the front door's, who cuts it
        "detokenize": False,
        "add_special_tokens": False,
    }
    if asked.seed is not None:
        body["seed"] = asked.seed
    if asked.top_logprobs is not None:
        body["logprobs"] = 1  # 0 would be none at all
    if asked.stop:
        body["stop"] = list(asked.stop)
    if asked.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    if request.handover is not None:
        body["disaggregated_params"] = dict(request.handover)
    if hands_over(request.handover):
        # Only a whole answer carries the parameters for the decode leg.
        body["stream"] = False
    else:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return {**body, **request.extra}


def hands_over(handover: Mapping[str, Any] | None) -> bool:
    """Whether this is the prefill leg of a request."""
    return handover is not None and handover.get("request_type") == CONTEXT_ONLY


def request_headers(request: GenerateRequest) -> dict[str, str]:
    """What TensorRT-LLM takes from headers."""
    headers = {"X-Request-Id": request.request_id}
    if request.traceparent is not None:
        headers["traceparent"] = request.traceparent
    return headers


def _unsupported(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    if request.cache_salt is not None:
        problem = "TensorRT-LLM's completions take no cache_salt, so the prompt would be shared"
        yield "cache_salt", f"{problem}; leave the salt out, or serve the model otherwise"
    if request.lora_name is not None:
        yield "model", f'no LoRA adapter "{request.lora_name}": the trtllm connector serves none'
    if request.sampling.top_logprobs:
        problem = "TensorRT-LLM names alternatives by their text, which does not tell the tokens"
        yield "top_logprobs", f"{problem}; ask for logprobs with top_logprobs 0"
    if request.data_parallel_rank not in {None, 0}:
        problem = f"rank {request.data_parallel_rank}: TensorRT-LLM chooses the rank itself"
        yield "data_parallel_rank", problem
