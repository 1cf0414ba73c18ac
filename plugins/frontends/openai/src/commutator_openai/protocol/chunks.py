"""What chat and completions answers differ in: how pieces become chunks, and chunks an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from commutator import TokenLogprob
from commutator.frontend import Piece, Plan, TokenUsage
from commutator_openai.protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    TokenLogprobs,
    TopLogprob,
    Usage,
)

__all__ = [
    "MIN_LOGPROB",
    "ChatShape",
    "CompletionShape",
    "Shape",
    "encode",
    "event",
]

encode = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Shape(ABC):
    """The JSON around one request's pieces; ``logprobs`` None or False leaves those out."""

    answer_class: ClassVar[Callable[..., Any]]
    answer_name: str
    chunk_name: str
    id_prefix: str

    def __init__(
        self, request_id: str, plan: Plan, *, include_usage: bool, logprobs: int | bool | None
    ) -> None:
        self.id = self.id_prefix + request_id
        self.model = plan.model
        self.created = int(time.time())
        self.include_usage = include_usage
        self.echoes = plan.echoes
        self.text = plan.text
        self.logprobs = logprobs
        common = encode(
            {"id": self.id, "object": self.chunk_name, "created": self.created, "model": self.model}
        )
        self._head = b"data: " + common[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @abstractmethod
    def first(self, number: int) -> bytes:
        """The chunk before an answer's first piece, or nothing."""

    @abstractmethod
    def content(self, number: int, piece: Piece) -> bytes:
        """The chunk of one piece that has text or log probabilities."""

    @abstractmethod
    def finish(self, number: int, reason: Finish) -> bytes:
        """An answer's last chunk."""

    @abstractmethod
    def choice(self, number: int, pieces: Sequence[Piece]) -> Any:
        """One choice of the whole response object, from all its pieces."""

    def answer(self, choices: Sequence[Sequence[Piece]], usage: TokenUsage) -> Any:
        """The whole response object, from all pieces of all choices."""
        return self.answer_class(
            id=self.id,
            object=self.answer_name,
            created=self.created,
            model=self.model,
            choices=tuple(self.choice(*numbered) for numbered in enumerate(choices)),
            usage=Usage.of(usage),
        )

    def usage(self, usage: TokenUsage) -> bytes:
        """The chunk that ends the stream, if ``include_usage`` says that the client wants it."""
        return self._head + b'],"usage":' + encode(Usage.of(usage)) + b"}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """A chunk around the JSON of one choice."""
        return self._head + choice + self._tail


class ChatShape(Shape):
    """Messages with a role."""

    answer_class = ChatCompletion
    answer_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first(self, number: int) -> bytes:
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self.chunk(
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)
        )

    def content(self, number: int, piece: Piece) -> bytes:
        logprobs = encode(self._entries([piece])) if self.logprobs else b"null"
        return self.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (number, encode(piece.text), logprobs)
        )

    def finish(self, number: int, reason: Finish) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, encode(reason))
        )

    def choice(self, number: int, pieces: Sequence[Piece]) -> ChatChoice:
        return ChatChoice(
            index=number,
            message=AssistantMessage("assistant", "".join(p.text for p in pieces)),
            logprobs=self._entries(pieces) if self.logprobs else None,
            finish_reason=pieces[-1].finish_reason or "stop",
        )

    def _entries(self, pieces: Iterable[Piece]) -> ChatLogprobs:
        return ChatLogprobs(
            tuple(self._entry(entry) for piece in pieces for _, entry in piece.logprobs)
        )

    def _entry(self, entry: TokenLogprob) -> TokenLogprobs:
        chosen = self._top(entry.token_id, entry.logprob)
        alternatives = tuple(self._top(token_id, logprob) for token_id, logprob in entry.top)
        return TokenLogprobs(chosen.token, chosen.logprob, chosen.bytes, alternatives)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            self.text.token_text(token_id),
            max(logprob, MIN_LOGPROB),
            tuple(self.text.token_bytes(token_id)),
        )


class CompletionShape(Shape):
    """Plain text, with the prompt before it when it is to be echoed."""

    answer_class = Completion
    answer_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def first(self, number: int) -> bytes:
        return self._chunk(number, self.echoes[number]) if self.echoes else b""

    def content(self, number: int, piece: Piece) -> bytes:
        logprobs = b"null" if self.logprobs is None else encode(self._lists([piece]))
        return self._chunk(number, piece.text, logprobs)

    def finish(self, number: int, reason: Finish) -> bytes:
        return self._chunk(number, "", finish=encode(reason))

    def choice(self, number: int, pieces: Sequence[Piece]) -> CompletionChoice:
        echo = self.echoes[number] if self.echoes else ""
        return CompletionChoice(
            index=number,
            text=echo + "".join(piece.text for piece in pieces),
            logprobs=None if self.logprobs is None else self._lists(pieces),
            finish_reason=pieces[-1].finish_reason or "stop",
        )

    def _chunk(
        self, number: int, text: str, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return self.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (number, encode(text), logprobs, finish)
        )

    def _lists(self, pieces: Iterable[Piece]) -> CompletionLogprobs:
        entries = [pair for piece in pieces for pair in piece.logprobs]
        show = self.text.token_text
        return CompletionLogprobs(
            tokens=tuple(show(entry.token_id) for _, entry in entries),
            token_logprobs=tuple(max(entry.logprob, MIN_LOGPROB) for _, entry in entries),
            top_logprobs=tuple(
                {show(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in entry.top}
                for _, entry in entries
            )
            if self.logprobs
            else None,
            text_offset=tuple(offset for offset, _ in entries),
        )
