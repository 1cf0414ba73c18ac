"""OpenAI-like completions with token ids, as several engines serve them: requests and answers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Generic, TypeVar, get_args

import msgspec

from commutator.contract.request import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from commutator.engine.protocol import DeltaStream
from commutator.errors import EngineError, EngineIncompleteError, RequestError
from commutator_engine_kit.constraints import check_enforced, without_added_tokens, written
from commutator_engine_kit.http import FailedAnswerError, HttpServer

__all__ = [
    "CONSTRAINTS",
    "STREAMED",
    "Choice",
    "Chunk",
    "CompletionReader",
    "JsonEvents",
    "ModelCard",
    "ModelList",
    "Version",
    "any_of",
    "decoded",
    "enforceable",
    "failure_of",
    "finish_reason_named",
    "likeliest",
    "request_headers",
    "sampling_parameters",
]

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
"""The part of a request's body for an answer that ``CompletionReader.feed`` reads."""

CONSTRAINTS = tuple(kind for kind in get_args(ConstraintKind) if kind != "lark")
"""The kinds of constraints that the servers that are asked here have words for."""

_DONE = b"[DONE]"
_DATA = b"data:"
_EVENT_END = b"\n\n"
_NEXT_DATA = _EVENT_END + _DATA
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
    "not_finished": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "cancelled": FinishReason.ABORT,
    "timeout": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


class Choice(msgspec.Struct):
    """The tokens that one chunk adds to the answer."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    """Of the engine's own form."""


class PromptTokensDetails(msgspec.Struct):
    """Part of ``Usage``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts, in the last chunk of a stream."""

    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """One server-sent event, or a whole answer, or an error in any of its three forms."""

    choices: Sequence[Choice] = ()
    usage: Usage | None = None
    error: Any = None
    """A message, or an object with ``message`` and perhaps ``code``."""
    object: str = ""
    message: str = ""
    """The message when ``object`` is "error"."""


class Version(msgspec.Struct):
    """The answer to GET /version."""

    version: str


class ModelCard(msgspec.Struct):
    """A model, or an adapter of the model ``parent``."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct):
    """The answer to GET /v1/models."""

    data: list[ModelCard]


T = TypeVar("T")
ChunkT = TypeVar("ChunkT", bound=Chunk)


class JsonEvents(Generic[T]):
    """Decodes server-sent events that are JSON or "[DONE]", which is None.

    It expects one ``data`` field per event, as the engines send it, and skips comments.
    """

    def __init__(self, engine: str, decoder: msgspec.json.Decoder[T]) -> None:
        """``engine`` is its name in errors."""
        self._engine = engine
        self._decoder = decoder
        self._rest = b""

    def feed(self, data: bytes) -> Iterable[T | None]:
        """What ``data`` completes. Raises EngineError after what comes before a wrong event."""
        received = (self._rest + data if self._rest else data).lstrip(b"\n")  # of empty events
        end = received.rfind(_EVENT_END)
        if end < 0:
            self._rest = received
            return ()
        events, self._rest = received[:end], received[end + len(_EVENT_END) :]
        before, _, last = events.rpartition(_NEXT_DATA)
        is_done = last.strip() == _DONE
        found = self._at_once(before if is_done else events)
        if found is None:
            return self._one_by_one(events)
        return (*found, None) if is_done else found

    def _at_once(self, events: bytes) -> list[T] | None:
        """All of them, which is cheaper; None when they may be more than lines of JSON."""
        if not events.startswith(_DATA):
            return None
        lines = events[len(_DATA) :].replace(_NEXT_DATA, b"\n")
        try:
            found = self._decoder.decode_lines(lines)
        except msgspec.MsgspecError:
            return None
        return found if len(found) == events.count(_NEXT_DATA) + 1 else None

    def _one_by_one(self, events: bytes) -> Iterator[T | None]:
        for event in events.split(_EVENT_END):
            event = event.lstrip(b"\n")  # noqa: PLW2901
            if event.startswith(_DATA):
                payload = event[len(_DATA) :].strip()
                is_done = payload == _DONE
                yield None if is_done else decoded(self._engine, payload, self._decoder.decode)


class CompletionReader(ABC, Generic[ChunkT]):
    """Turns received bytes into deltas. Yields the last delta only after the usage chunk."""

    def __init__(self, engine: str, decoder: msgspec.json.Decoder[ChunkT]) -> None:
        """``engine`` is its name in errors; ``decoder`` decodes its chunks."""
        self._engine = engine
        self._decoder = decoder
        self._events = JsonEvents(engine, decoder)
        self._last: Choice | None = None
        """The choice with the finish reason, until the end of the stream."""
        self._cached_tokens: int | None = None
        self.began = False
        """Whether a part of the answer has arrived."""
        self.ended = False
        """Whether the answer is complete."""

    @abstractmethod
    def logprobs(self, choice: Any) -> tuple[TokenLogprob, ...]:
        """The logprobs of a choice of the engine's own chunk."""

    @abstractmethod
    def handover(self, chunk: ChunkT) -> Mapping[str, Any] | None:
        """The parameters for the decode request in the whole answer to a prefill request."""

    async def fill(
        self,
        stream: DeltaStream,
        server: HttpServer,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        """Send a request, and feed ``stream`` with the deltas of its answer.

        Raises FailedAnswerError, EngineIncompleteError and EngineUnavailableError.
        """
        async with await server.post(path, body, headers) as answer:
            if body["stream"]:
                async for data in answer:
                    for delta in self.feed(data):
                        stream.feed(delta)
            else:
                for delta in self.whole(await answer.read()):
                    stream.feed(delta)
        if not self.ended:
            raise EngineIncompleteError(f"{server.where} ended the stream before the answer")

    def feed(self, data: bytes) -> Iterator[TokenDelta]:
        """The deltas in ``data``, part of a stream of server-sent events.

        Tokens of several events are one delta. Raises FailedAnswerError; EngineError when an event
        cannot be parsed.
        """
        token_ids: list[int] = []
        try:
            for chunk in self._events.feed(data):
                if chunk is not None and (more := self._only_tokens(chunk)) is not None:
                    token_ids += more
                    continue
                yield from _together(token_ids)
                token_ids = []
                yield from self._end() if chunk is None else self._on_chunk(chunk)
        except EngineError:
            yield from _together(token_ids)  # what came before the event that is wrong
            raise
        yield from _together(token_ids)

    def whole(self, body: bytes) -> Iterator[TokenDelta]:
        """The one delta of an answer that was not streamed. Raises as ``feed`` does."""
        chunk = decoded(self._engine, body, self._decoder.decode)
        yield from self._on_chunk(chunk)
        yield from self._end(self.handover(chunk) if self._last is not None else None)

    def _only_tokens(self, chunk: ChunkT) -> Sequence[int] | None:
        """The tokens of a chunk that has nothing else, as nearly all have; None for any other."""
        if chunk.error is not None or chunk.usage is not None or len(chunk.choices) != 1:
            return None
        (choice,) = chunk.choices
        if choice.finish_reason is not None or chunk.object == "error":
            return None
        if choice.logprobs is not None and self.logprobs(choice):
            return None
        self.began = True
        return choice.token_ids or ()

    def _on_chunk(self, chunk: ChunkT) -> Iterator[TokenDelta]:
        if chunk.error is not None or chunk.object == "error":
            raise failure_of(self._engine, chunk.error or chunk.message)
        for choice in chunk.choices:
            self.began = True
            if choice.finish_reason is None:
                yield TokenDelta(
                    token_ids=tuple(choice.token_ids or ()), logprobs=self.logprobs(choice)
                )
            else:
                self._last = choice
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self._cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens

    def _end(self, handover: Mapping[str, Any] | None = None) -> Iterator[TokenDelta]:
        last, self._last = self._last, None
        if last is not None and last.finish_reason is not None:
            self.ended = True
            yield TokenDelta(
                token_ids=tuple(last.token_ids or ()),
                logprobs=self.logprobs(last),
                finish_reason=finish_reason_named(last.finish_reason),
                stop_reason=last.stop_reason,
                cached_tokens=self._cached_tokens,
                handover=handover,
            )


def _together(token_ids: Sequence[int]) -> Iterator[TokenDelta]:
    """One delta of tokens that came together; none without tokens."""
    if token_ids:
        yield TokenDelta(token_ids=tuple(token_ids))


def finish_reason_named(name: str) -> FinishReason:
    """The reason that an engine calls ``name``; one that we do not know is a stop."""
    return _REASONS.get(name, FinishReason.STOP)


def likeliest(logprobs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens. Engines add the chosen one, which may not be among them."""
    return tuple(sorted(logprobs, key=lambda entry: -entry[1])[:count])


def decoded(engine: str, payload: bytes, decode: Callable[[bytes], T]) -> T:
    """A part of an engine's answer. Raises EngineError when it cannot be parsed."""
    try:
        return decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{engine} sent an answer that cannot be parsed: {error}") from error


def failure_of(engine: str, error: Any) -> FailedAnswerError:
    """The failure that an engine reported in a stream: a message, or an object that has one."""
    code = None
    if isinstance(error, dict):
        code, error = error.get("code"), error.get("message")
    status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
    return FailedAnswerError(status, str(error or f"{engine} failed the request"))


def sampling_parameters(request: GenerateRequest) -> dict[str, Any]:
    """The sampling parameters by their usual names, all but `logprobs`.

    It sets every parameter, so that a server's own defaults have no effect. A continued answer is
    a new prompt to the server, with token limits reduced by the tokens generated before: presence
    and frequency penalties count only new tokens, and a seed starts its sequence again. The
    repetition penalty counts prompts, too, so it does not change.
    """
    asked, begun = request.sampling, request.generated_prefix
    parameters: dict[str, Any] = {
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
        parameters["seed"] = asked.seed
    if asked.stop:
        parameters["stop"] = list(asked.stop)
    if asked.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    return parameters


def enforceable(
    request: GenerateRequest, engine: str, *, llguidance: bool = False, thoughts: bool = False
) -> Constraint | None:
    """What a server of ``engine`` is to enforce, in its library's words; None: nothing.

    ``llguidance``: whether that is its library, and not another one. ``thoughts``: whether it
    begins by itself after those with which an answer begins, or else with the first token. Raises
    RequestError for a constraint that the server would enforce otherwise than asked.
    """
    constraint = request.constraint
    if constraint is None:
        return None
    problem = None
    if constraint.after and not thoughts:
        problem = "cannot begin to constrain an answer after tokens of the request's choice"
    elif constraint.whitespace is not None and not llguidance:
        problem = "decides itself about the white space in JSON"
    elif request.generated_prefix:
        problem = "cannot constrain the rest of an answer that another worker began"
    if problem is not None:
        raise RequestError(f"{engine} {problem}", "response_format")
    if llguidance:
        return written(constraint)
    check_enforced(constraint, engine)
    return without_added_tokens(constraint)


def any_of(choices: Iterable[str]) -> str:
    """A regular expression for a choice, for servers that have no other words for it."""
    return "(" + "|".join(map(re.escape, choices)) + ")"


def request_headers(request: GenerateRequest) -> dict[str, str]:
    """The HTTP headers of a request: its id and its trace."""
    headers = {"X-Request-Id": request.request_id}
    if request.traceparent is not None:
        headers["traceparent"] = request.traceparent
    return headers
