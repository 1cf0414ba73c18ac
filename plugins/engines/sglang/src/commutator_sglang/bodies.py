"""Makes the body of a request for SGLang's /generate. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from commutator import Constraint, GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator_engine_kit.completions import enforceable
from commutator_sglang.api import ServerInfo
from commutator_sglang.handover import ANSWER_WITHIN_S

__all__ = ["ABORT", "GENERATE", "request_body"]

GENERATE = "/generate"
ABORT = "/abort_request"
_ALL_TOKENS = -1


def request_body(request: GenerateRequest, request_id: str, server: ServerInfo) -> dict[str, Any]:
    """The JSON body. The request can be aborted by its ``request_id``.

    It sets every sampling parameter, so that the server's defaults have no effect.
    ``request.options`` are parameters that only SGLang has (`stop_regex`, ...). Raises RequestError
    for a seed that this server would ignore, and for a constraint that it cannot be told.
    """
    asked = request.sampling
    if asked.seed is not None and asked.temperature and not server.enable_deterministic_inference:
        raise RequestError(
            "seed: this SGLang server ignores it; run the server with "
            "--enable-deterministic-inference"
        )
    constraint = enforceable(request, "SGLang", whitespace=False)
    followed = {} if constraint is None else _constraint(constraint)
    sampling = {**_sampling(asked, request.generated_prefix), **followed, **request.options}
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": list(request.token_ids),
        "sampling_params": sampling,
        "stream": True,
    }
    if asked.top_logprobs is not None:
        body["return_logprob"] = True
        body["top_logprobs_num"] = asked.top_logprobs
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.adapter is not None:
        body["lora_path"] = request.adapter.digest
    if request.data_parallel_rank is not None:
        body["routed_dp_rank"] = request.data_parallel_rank
    if server.enable_priority_scheduling:
        low_first = server.schedule_low_priority_values_first
        body["priority"] = request.priority if low_first else -request.priority
    if request.handover is not None:
        body |= {name: value for name, value in request.handover.items() if name != ANSWER_WITHIN_S}
    return body


_ANY_OBJECT = json.dumps({"type": "object"})


def _constraint(constraint: Constraint) -> dict[str, str]:
    """SGLang's parameter for it; a choice is a regular expression there."""
    value = constraint.value
    if constraint.kind == "choice":
        return {"regex": "(" + "|".join(map(re.escape, value)) + ")"}
    assert isinstance(value, str)
    match constraint.kind:
        case "json_object":
            return {"json_schema": _ANY_OBJECT}
        case "grammar":
            return {"ebnf": value}
        case kind:
            return {kind: value}


def _sampling(asked: SamplingParams, begun: int) -> dict[str, Any]:
    """The sampling parameters, with token limits reduced by the ``begun`` tokens generated before.

    To SGLang a continued answer is a new prompt: all penalties count only new tokens.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": asked.max_tokens - begun,
        "min_new_tokens": max(0, asked.min_tokens - begun),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or _ALL_TOKENS,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": list(asked.stop_token_ids),
        "stop": list(asked.stop),
    }
    if asked.seed is not None:
        sampling["sampling_seed"] = asked.seed
    if asked.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    return sampling
