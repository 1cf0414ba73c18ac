"""Requests to TensorRT-LLM's /v1/completions, and the deltas in the answers. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from commutator import Constraint, GenerateRequest, TokenLogprob
from commutator.errors import EngineError, RequestError
from commutator_engine_kit import completions
from commutator_engine_kit.completions import STREAMED, any_of, enforceable, sampling_parameters
from commutator_trtllm.handover import CONTEXT_ONLY, WHOLE

_NO_SALT = (
    "TensorRT-LLM's completions ignore cache_salt, so the prompt would be shared; remove the salt, "
    "or use another engine"
)

COMPLETIONS = "/v1/completions"
"""The only endpoint that both takes token ids and answers with them."""


def request_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The JSON body. ``request.options`` are parameters that only TensorRT-LLM has.

    Raises RequestError for unsupported parameters.
    """
    for param, problem in _unsupported(request):
        raise RequestError(problem, param)
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
        **sampling_parameters(request),
        "include_stop_str_in_output": True,  # the front door cuts the text
        "detokenize": False,
        "add_special_tokens": False,
    }
    if request.sampling.top_logprobs is not None:
        body["logprobs"] = 1  # 0 would return none
    if request.handover is not None:
        body["disaggregated_params"] = dict(request.handover)
    # Only an answer that is not streamed has the parameters for the decode request.
    body |= {"stream": False} if hands_over(request.handover) else STREAMED
    if (constraint := enforceable(request, "TensorRT-LLM")) is not None:
        body["response_format"] = _response_format(constraint)
    return {**body, **request.options}


def _response_format(constraint: Constraint) -> dict[str, Any]:
    """TensorRT-LLM's words for it; a choice is a regular expression there."""
    value = constraint.value
    if constraint.kind == "choice":
        return {"type": "regex", "regex": any_of(value)}
    assert isinstance(value, str)
    match constraint.kind:
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            return {"type": "json", "schema": json.loads(value)}
        case "regex":
            return {"type": "regex", "regex": value}
        case "grammar":
            return {"type": "ebnf", "ebnf": value}
        case "structural_tag":
            return json.loads(value)  # type: ignore[no-any-return]
        case "lark":
            raise AssertionError("not among the kinds that are enforced")


def check_forwarded(body: bytes) -> None:
    """Raise RequestError if a client's own body asks for what the server would not do."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if bytes(given.get("cache_salt", b"null")) != b"null":
        raise RequestError(_NO_SALT, "cache_salt")


def hands_over(handover: Mapping[str, Any] | None) -> bool:
    """Whether this is the prefill request of a disaggregated one."""
    return handover is not None and handover.get("request_type") == CONTEXT_ONLY


def _unsupported(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    if request.cache_salt is not None:
        yield "cache_salt", _NO_SALT
    if request.sampling.top_logprobs:
        problem = "TensorRT-LLM returns alternatives as text, which does not identify the tokens"
        yield "top_logprobs", f"{problem}; request logprobs with top_logprobs 0"
    if request.data_parallel_rank not in {None, 0}:
        problem = f"rank {request.data_parallel_rank}: TensorRT-LLM chooses the rank itself"
        yield "data_parallel_rank", problem


_CONTINUES = ("length", "not_finished")
"""Finish reasons of a context server for an answer that a generation server is to continue."""


class Logprobs(msgspec.Struct):
    """The answer names tokens by their text only, which does not identify them."""

    token_logprobs: Sequence[float | None] = ()


class Choice(completions.Choice):
    """The tokens that one chunk adds to the answer."""

    logprobs: Logprobs | None = None
    disaggregated_params: dict[str, Any] | None = None


class Chunk(completions.Chunk):
    """One server-sent event of /v1/completions, or a whole answer, or an error."""

    choices: Sequence[Choice] = ()


_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader(completions.CompletionReader[Chunk]):
    """Reads the answers of /v1/completions."""

    def __init__(self) -> None:
        super().__init__("TensorRT-LLM", _decoder)

    def handover(self, chunk: Chunk) -> Mapping[str, Any] | None:
        choice = chunk.choices[0]
        # An answer that ended with its first token needs no generation server, and hands over no
        # KV.
        return choice.disaggregated_params if choice.finish_reason in _CONTINUES else WHOLE

    def logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        if choice.logprobs is None:
            return ()
        values, token_ids = choice.logprobs.token_logprobs, choice.token_ids or ()
        if len(values) != len(token_ids):
            raise EngineError(
                f"TensorRT-LLM sent {len(values)} logprobs for {len(token_ids)} tokens"
            )
        return tuple(
            TokenLogprob(token_id=token, logprob=0.0 if value is None else value)
            for token, value in zip(token_ids, values, strict=True)
        )
