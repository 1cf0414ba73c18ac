"""Requests to SGLang, the parts of its answers that we read, and the deltas in them. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from attrs import evolve

from commutator import (
    Constraint,
    FinishReason,
    GenerateRequest,
    Pooling,
    TokenDelta,
    TokenLogprob,
)
from commutator.errors import EngineError, RequestError
from commutator_engine_kit.completions import (
    JsonEvents,
    any_of,
    enforceable,
    failure_of,
    finish_reason_named,
    likeliest,
    sampling_parameters,
)
from commutator_sglang.handover import ANSWER_WITHIN_S

Logprob = tuple[float | None, int, str | None]
"""Its value, the token's id, and the token's text if requested."""


class FinishedBecause(msgspec.Struct):
    """Why a request ended; ``type`` is stop, length or abort."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct):
    """What a chunk says beside its tokens."""

    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: FinishedBecause | None = None
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None
    input_token_logprobs: list[Logprob] | None = None
    input_top_logprobs: list[list[Logprob] | None] | None = None


class Chunk(msgspec.Struct):
    """One server-sent event of /generate, or the body of an error answer."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: Any = None
    """A message, or an object with ``message`` and perhaps ``code``."""


class KvEvents(msgspec.Struct):
    """Where KV events are published. These are the ports of rank 0; rank N adds N."""

    publisher: str
    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    dp_size: int = 1
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class KvEventsConfig(msgspec.Struct):
    """The server's `--kv-events-config`."""

    publisher: str = "null"
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""


class ServerInfo(msgspec.Struct):
    """The answer to GET /server_info."""

    version: str
    page_size: int
    max_total_num_tokens: int
    max_req_input_len: int
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    dp_size: int = 1
    disable_radix_cache: bool = False
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    enable_deterministic_inference: bool = False
    grammar_backend: str | None = None
    kv_events: KvEvents | None = None
    """None for a server that publishes nothing, or on Unix sockets."""
    kv_events_config: str | None = None
    """JSON of ``KvEventsConfig``."""


class ModelInfo(msgspec.Struct):
    """The answer to GET /model_info."""

    served_model_name: str
    is_generation: bool = True


class RankLoad(msgspec.Struct):
    """The load of one data-parallel rank."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0


class Loads(msgspec.Struct):
    """The answer to GET /v1/loads."""

    loads: list[RankLoad]


class _Embedding(msgspec.Struct):
    index: int
    embedding: bytes
    """In JSON as base64."""


class Embeddings(msgspec.Struct):
    """The answer to POST EMBEDDINGS."""

    data: list[_Embedding]

    @property
    def vectors(self) -> bytes:
        """As ``TokenDelta.vectors``: SGLang's floats are little-endian, too."""
        return b"".join(one.embedding for one in sorted(self.data, key=lambda one: one.index))


GENERATE = "/generate"
EMBEDDINGS = "/v1/embeddings"
"""Of servers with `--is-embedding`."""
ABORT = "/abort_request"
_ALL_TOKENS = -1
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""SGLang's, of sampling parameters that have others."""


def embeddings_body(request: GenerateRequest, pooling: Pooling, model: str) -> dict[str, Any]:
    """The JSON body for EMBEDDINGS. Raises RequestError for what SGLang cannot be told."""
    if not pooling.activation:
        text = "normalize: SGLang decides itself whether vectors are normalized; leave it out"
        raise RequestError(text, "normalize")
    at, inputs, token_ids = 0, [], [*request.token_ids]
    for length in pooling.lengths:
        inputs.append(token_ids[at : at + length])
        at += length
    body: dict[str, Any] = {"model": model, "input": inputs, "encoding_format": "base64"}
    if pooling.dimensions is not None:
        body["dimensions"] = pooling.dimensions
    return body


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
    llguidance = server.grammar_backend == "llguidance"
    constraint = enforceable(request, "SGLang", llguidance=llguidance)
    followed = {} if constraint is None else _constraint(constraint)
    sampling = {**_sampling(request), **followed, **request.options}
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": list(request.token_ids),
        "sampling_params": sampling,
        "stream": True,
    }
    if asked.top_logprobs is not None:
        body["return_logprob"] = True
        body["top_logprobs_num"] = asked.top_logprobs
    if request.prompt_logprobs is not None:
        body["return_logprob"], body["logprob_start_len"] = True, 0
        body["top_logprobs_num"] = max(request.prompt_logprobs, asked.top_logprobs or 0)
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
        return {"regex": any_of(value)}
    assert isinstance(value, str)
    match constraint.kind:
        case "json_object":
            return {"json_schema": _ANY_OBJECT}
        case "grammar":
            return {"ebnf": value}
        case kind:
            return {kind: value}


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    """To SGLang a continued answer is a new prompt: all penalties count only new tokens."""
    usual = sampling_parameters(request)
    sampling = {_NAMES.get(name, name): value for name, value in usual.items()}
    return {
        **sampling,
        "top_k": request.sampling.top_k or _ALL_TOKENS,
        "stop": usual.get("stop", []),
    }


_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader:
    """Turns received bytes into deltas.

    Each chunk has either the new tokens (``--incremental-streaming-output``) or all tokens so far.
    The token count in the chunk tells which of them are new.
    """

    def __init__(
        self,
        top_logprobs: int | None,
        cut_after: Collection[int] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        """``cut_after``: tokens that end the answer here, but not at the server."""
        self._top = top_logprobs
        self._prompt_top = prompt_logprobs
        self._cut_after = cut_after
        self._events = JsonEvents("SGLang", _decoder)
        self._tokens = 0
        self._has_cached = False
        self.ended = False
        """Whether the answer is complete."""
        self.cut = False
        """Whether it was ended by ``cut_after``, so that the server is still generating."""

    @property
    def begun(self) -> bool:
        """Whether a token has arrived."""
        return self._tokens > 0

    def feed(self, data: bytes) -> Iterator[TokenDelta]:
        """The deltas in ``data``, part of a stream of server-sent events.

        Raises FailedAnswerError; EngineError when an event cannot be parsed.
        """
        for chunk in self._events.feed(data):
            if chunk is not None:
                yield from self._on_chunk(chunk)

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        if chunk.error is not None:
            raise failure_of("SGLang", chunk.error)
        meta = chunk.meta_info
        if meta is None or self.ended:
            return
        why = meta.finish_reason
        if why is not None and why.type == "abort" and why.status_code is not None:
            raise failure_of("SGLang", {"code": why.status_code, "message": why.message})
        new = meta.completion_tokens - self._tokens
        if new <= 0 and why is None:
            return
        token_ids = tuple(chunk.output_ids[-new:]) if new > 0 else ()
        prompt = () if self.begun or not token_ids else self._prompt_logprobs(meta)
        self._tokens += len(token_ids)
        cached = None if self._has_cached else meta.cached_tokens
        self._has_cached |= cached is not None
        self.ended = why is not None
        delta = TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(meta, len(token_ids)),
            prompt_logprobs=prompt,
            finish_reason=None if why is None else finish_reason_named(why.type),
            stop_reason=None if why is None else _stopped_by(why),
            cached_tokens=cached,
            error=None if why is None else why.message,
        )
        yield self._cut_short(delta)

    def _cut_short(self, delta: TokenDelta) -> TokenDelta:
        for number, token in enumerate(delta.token_ids, 1):
            if token in self._cut_after:
                self.cut, self.ended = not self.ended, True
                return evolve(
                    delta,
                    token_ids=delta.token_ids[:number],
                    logprobs=delta.logprobs[:number],
                    finish_reason=FinishReason.STOP,
                    stop_reason=token,
                )
        return delta

    def _prompt_logprobs(self, meta: MetaInfo) -> tuple[TokenLogprob, ...]:
        """Those of all tokens of the prompt but the first, of which nothing is known."""
        top = self._prompt_top
        if top is None:
            return ()
        chosen = (meta.input_token_logprobs or [])[1:]
        tops = (meta.input_top_logprobs or [])[1:] or [None] * len(chosen)
        return tuple(_entry(*pair, top) for pair in zip(chosen, tops, strict=True))

    def _logprobs(self, meta: MetaInfo, count: int) -> tuple[TokenLogprob, ...]:
        if self._top is None or not count:
            return ()
        chosen = (meta.output_token_logprobs or [])[-count:]
        tops = (meta.output_top_logprobs or [None] * count)[-count:]
        if len(chosen) != count or len(tops) != count:
            raise EngineError(f"SGLang sent {len(chosen)} logprobs for {count} tokens")
        return tuple(_entry(*pair, self._top) for pair in zip(chosen, tops, strict=True))


def _entry(chosen: Logprob, top: list[Logprob] | None, most: int) -> TokenLogprob:
    value, token_id, _ = chosen
    return TokenLogprob(
        token_id=token_id,
        logprob=_value(value),
        top=likeliest(((one, _value(value)) for value, one, _ in top or ()), most),
    )


def _stopped_by(why: FinishedBecause) -> int | str | None:
    return None if isinstance(why.matched, list) else why.matched


def _value(logprob: float | None) -> float:
    return 0.0 if logprob is None else logprob
