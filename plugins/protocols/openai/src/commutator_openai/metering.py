"""What a request that an engine answers itself is charged: what it states, and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

_MAX_ANSWERS = 256
_MAX_TOKENS = 1 << 31
_WITHOUT_ANSWER = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score"})


def stated_answers(path: str, body: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many answers a request that is passed through wants, and their ``max_tokens`` if stated.

    What is no such number is left to the engine to refuse.
    """
    if path in _WITHOUT_ANSWER:
        return 1, 0
    answers = _count(body.get("n"), _MAX_ANSWERS) or 1
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if (stated := _count(body.get(name), _MAX_TOKENS)) is not None:
            return answers, stated
    return answers, None


def _count(given: object, most: int) -> int | None:
    # Not isinstance: True is an int, too.
    return min(given, most) if type(given) is int and given > 0 else None


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    # The same of /v1/responses.
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Said(msgspec.Struct):
    usage: _Usage | None = None
    response: _Response | None = None
    """In the events of /v1/responses."""


_said = msgspec.json.Decoder(_Said)


class AnswerUsage:
    """Tokens of an engine's own answer, read from its ``usage`` as it passes.

    Streams say it only if the client asked for it. Without it, the prompt is what it was estimated
    to be, and an answer has a token for each event of its stream.
    """

    def __init__(self, prompt_tokens: int, content_type: str) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._generated: int | None = None
        self._events = 0
        self._streamed = content_type.startswith("text/event-stream")
        self._is_json = content_type.startswith("application/json")

    @property
    def generated_tokens(self) -> int:
        return self._events if self._generated is None else self._generated

    def take(self, part: bytes) -> None:
        """``part`` is whole lines of a stream, or the whole of another answer."""
        if self._streamed:
            for line in part.split(b"\n"):
                if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                    self._events += 1
                    self._read(line[5:])
        elif self._is_json:
            self._read(part)

    def _read(self, text: bytes) -> None:
        if b'"usage"' not in text:
            return
        try:
            said = _said.decode(text)
        except msgspec.MsgspecError:
            return  # text that only mentions it
        used = said.usage or (said.response.usage if said.response is not None else None)
        if used is None:
            return
        prompt, generated, details = (
            (used.prompt_tokens, used.completion_tokens, used.prompt_tokens_details)
            if used.prompt_tokens is not None
            else (used.input_tokens, used.output_tokens, used.input_tokens_details)
        )
        if prompt is not None:
            self.prompt_tokens = prompt
            self._generated = generated or 0
        if details is not None:
            self.cached_tokens = details.cached_tokens or 0
