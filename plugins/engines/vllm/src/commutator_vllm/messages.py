"""Requests to the two endpoints of vLLM that take token ids, and deltas in the answers. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from attrs import evolve

from commutator import GenerateRequest, Operation, Pooling, TokenDelta, TokenLogprob
from commutator.errors import RequestError
from commutator_engine_kit import completions
from commutator_engine_kit.completions import STREAMED, enforceable, likeliest, sampling_parameters

GENERATE = "/inference/v1/generate"
"""Tokens in, tokens out. Cheaper for vLLM, but needs `--enable-scale-out`."""
COMPLETIONS = "/v1/completions"
"""Always available."""
EMBEDDINGS = "/v1/embeddings"
CLASSIFY = "/classify"
"""These two of servers in pooling mode, each of which has one."""
NAMED_TOKENS = "logprob_token_ids"
"""The option that names tokens whose log probabilities are wanted."""
_MOST_LOGPROBS = 20
"""vLLM's own limit, `--max-logprobs`, unless that is set."""


def pooling_body(
    request: GenerateRequest, pooling: Pooling, model: str, *, use_priority: bool
) -> dict[str, Any]:
    """The JSON body for EMBEDDINGS, or CLASSIFY."""
    at, inputs, token_ids = 0, [], [*request.token_ids]
    for length in pooling.lengths:
        inputs.append(token_ids[at : at + length])
        at += length
    body: dict[str, Any] = {"model": model, "input": inputs}
    if pooling.operation != Operation.CLASSIFY:
        body["encoding_format"] = "base64"
    if pooling.dimensions is not None:
        body["dimensions"] = pooling.dimensions
    if not pooling.activation:
        body["use_activation"] = False
    if use_priority and request.priority:
        body["priority"] = request.priority
    return body


class _Embedding(msgspec.Struct):
    index: int
    embedding: bytes
    """In JSON as base64."""


class Embeddings(msgspec.Struct):
    """The answer of EMBEDDINGS."""

    data: list[_Embedding]

    @property
    def vectors(self) -> bytes:
        """As ``TokenDelta.vectors``: vLLM's floats are little-endian, too."""
        return b"".join(one.embedding for one in sorted(self.data, key=lambda one: one.index))


class _Class(msgspec.Struct):
    index: int
    probs: list[float]


class Classes(msgspec.Struct):
    """The answer of CLASSIFY."""

    data: list[_Class]

    @property
    def vectors(self) -> bytes:
        """As ``TokenDelta.vectors``: the probability of each class, or its logit."""
        rows = sorted(self.data, key=lambda one: one.index)
        return b"".join(struct.pack(f"<{len(row.probs)}f", *row.probs) for row in rows)


def request_body(
    path: str,
    request: GenerateRequest,
    model: str,
    *,
    use_priority: bool,
    llguidance: bool = False,
) -> dict[str, Any]:
    """The JSON body for ``path``: GENERATE or COMPLETIONS.

    ``llguidance`` as of ``enforceable``. ``request.options`` are parameters that only vLLM has
    (`bad_words`, ...). Raises RequestError for a constraint that vLLM cannot be told of.
    """
    body: dict[str, Any] = {"model": request.adapter_digest or model}
    # Only an answer that is not streamed has the parameters for the decode request, and log
    # probabilities of the prompt.
    whole = hands_over(request.handover) or request.prompt_logprobs is not None
    body |= {"stream": False} if whole else STREAMED
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if use_priority and request.priority:
        body["priority"] = request.priority
    if request.handover is not None:
        body["kv_transfer_params"] = dict(request.handover)
    if path == GENERATE:
        sampling = sampling_fields(request, llguidance=llguidance)
        if sampling.get("logprobs"):
            sampling["logprobs"] += 1  # the chosen token is one of them here
        return {**body, "token_ids": list(request.token_ids), "sampling_params": sampling}
    if request.sampling.top_logprobs is not None:
        body["logprobs"] = request.sampling.top_logprobs
    return {
        **body,
        **_sampling(request, llguidance=llguidance),
        "prompt": list(request.token_ids),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def needs_completions(request: GenerateRequest) -> bool:
    """Whether only COMPLETIONS tells all the log probabilities that are wanted."""
    most = request.sampling.top_logprobs
    return most is not None and (most >= _MOST_LOGPROBS or NAMED_TOKENS in request.options)


def alternatives(request: GenerateRequest) -> int | None:
    """How many tokens are told beside each token of the answer; None: nothing is told."""
    most, named = request.sampling.top_logprobs, request.options.get(NAMED_TOKENS)
    return len(named) + 1 if most is not None and named else most


def prompt_entries(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Any] | None], top: int
) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a prompt; of each position vLLM tells its token and the likeliest.

    Each has ``logprob`` and ``rank``.
    """
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=known[token_id].logprob,
            top=likeliest(((one, entry.logprob) for one, entry in known.items()), top),
            rank=known[token_id].rank,
        )
        for token_id, known in zip(token_ids, positions, strict=False)
        if known is not None
    )


def sampling_fields(
    request: GenerateRequest, *, llguidance: bool, thoughts: bool = False
) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams for a request that is answered with tokens.

    ``llguidance`` and ``thoughts`` as of ``enforceable``.
    """
    # The front door makes the text; vLLM needs it only to find stop strings.
    fields = _sampling(request, llguidance=llguidance, thoughts=thoughts)
    return {**fields, "detokenize": bool(request.sampling.stop)}


def _sampling(
    request: GenerateRequest, *, llguidance: bool, thoughts: bool = False
) -> dict[str, Any]:
    fields = sampling_parameters(request)
    # Tokens that are named take the place of the likeliest.
    if request.sampling.top_logprobs is not None and not request.options.get(NAMED_TOKENS):
        fields["logprobs"] = request.sampling.top_logprobs
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = request.prompt_logprobs
    constraint = enforceable(request, "vLLM", llguidance=llguidance, thoughts=thoughts)
    if constraint is not None:
        name = _GUIDES.get(constraint.kind, constraint.kind)
        fields["structured_outputs"] = {name: constraint.value or True}
    return {**fields, **request.options}


_GUIDES = {"json_schema": "json"}
"""vLLM's names of kinds of constraints, where they are others."""


def check_forwarded(body: bytes) -> None:
    """Raise RequestError if a client's own body asks for calls that follow schemas as it likes.

    vLLM holds calls to schemas in text that is free with xgrammar only. Calls that are forced
    follow theirs.
    """
    if b'"strict"' not in body:
        return
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        asked = msgspec.json.decode(body, type=_Calling, strict=False)
        if asked.tool_choice in (None, "auto") and any(map(_is_strict, asked.tools or ())):
            raise RequestError(
                "tools: strict: this vLLM server enforces schemas with llguidance, and then not "
                'where the model may call; leave strict out, use tool_choice "required", name '
                "its tool_parser, or run vLLM with --structured-outputs-config.backend=auto",
                "tools",
                "unsupported_parameter",
            )


class _Calling(msgspec.Struct):
    tools: list[Any] | None = None
    tool_choice: Any = None


def _is_strict(tool: Any) -> bool:
    match tool:
        case {"strict": True} | {"function": {"strict": True}}:
            return True
    return False


def hands_over(handover: Mapping[str, Any] | None) -> bool:
    """Whether this is the prefill request of a disaggregated one."""
    return bool(handover and handover.get("do_remote_decode"))


def request_headers(request: GenerateRequest) -> dict[str, str]:
    """The HTTP headers that vLLM reads: request id, trace and data-parallel rank."""
    headers = completions.request_headers(request)
    if request.data_parallel_rank is not None:
        headers["X-data-parallel-rank"] = str(request.data_parallel_rank)
    return headers


_ID_MARK = "token_id:"


class TokenLogprobEntry(msgspec.Struct):
    """One token and its logprob."""

    token_id: int
    logprob: float


class PositionLogprobs(TokenLogprobEntry):
    """The chosen token at one position; ``top_logprobs`` starts with the same token."""

    top_logprobs: list[TokenLogprobEntry] = []


class Logprobs(msgspec.Struct):
    """Logprobs of new tokens.

    /inference/v1/generate fills ``content``; /v1/completions fills the other fields, where a token
    is written ``token_id:N``.
    """

    content: list[PositionLogprobs] | None = None
    tokens: Sequence[str] = ()
    token_logprobs: Sequence[float | None] = ()
    top_logprobs: Sequence[dict[str, float] | None] = ()


class PromptLogprob(msgspec.Struct):
    """One token that the prompt has, or could have, at a place."""

    logprob: float
    rank: int | None = None


PromptLogprobs = Sequence[dict[int, PromptLogprob] | None]
"""By token id, for each token of the prompt, which comes first; nothing for its first token."""


class Choice(completions.Choice):
    """The tokens that one chunk adds to the answer."""

    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Chunk(completions.Chunk):
    """One server-sent event of either endpoint, or a whole answer."""

    choices: Sequence[Choice] = ()
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader(completions.CompletionReader[Chunk]):
    """Reads the answers of both endpoints."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__("vLLM", _decoder)
        self._top = alternatives(request) or 0
        self._request = request
        self._prompt: PromptLogprobs | None = None

    def whole(self, body: bytes) -> Iterator[TokenDelta]:
        for delta in super().whole(body):
            found, top = self._prompt, self._request.prompt_logprobs
            if found is None or top is None:
                yield delta
            else:
                entries = prompt_entries(self._request.token_ids, found, top)
                yield evolve(delta, prompt_logprobs=entries)

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        of_choices = (choice.prompt_logprobs for choice in chunk.choices)
        self._prompt = chunk.prompt_logprobs or next(of_choices, None) or self._prompt
        return super()._on_chunk(chunk)

    def handover(self, chunk: Chunk) -> Mapping[str, Any] | None:
        return chunk.kv_transfer_params

    def logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        logprobs = choice.logprobs
        if logprobs is None:
            return ()
        if logprobs.content is not None:
            return tuple(
                TokenLogprob(
                    token_id=entry.token_id,
                    logprob=entry.logprob,
                    top=self._best([(one.token_id, one.logprob) for one in entry.top_logprobs]),
                )
                for entry in logprobs.content
            )
        tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        return tuple(
            TokenLogprob(
                token_id=_token_id(token),
                logprob=0.0 if value is None else value,
                top=self._best([(_token_id(t), v) for t, v in (others or {}).items()]),
            )
            for token, value, others in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=True
            )
        )

    def _best(self, entries: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
        return likeliest(dict(entries).items(), self._top)


def _token_id(text: str) -> int:
    return int(text.removeprefix(_ID_MARK))
