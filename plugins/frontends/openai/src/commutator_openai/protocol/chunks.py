"""What chat and completions answers differ in: how pieces become chunks, and chunks an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from attrs import define, field

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
    "WholeAnswer",
    "encode",
    "event",
]

encode = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@define
class WholeAnswer:
    """One answer that is not streamed, as far as it has come."""

    texts: list[str] = field(factory=list)
    logprobs: dict[str, list[bytes]] = field(factory=dict)
    """The JSON of lists, without brackets, by the name of the list."""
    finish_reason: Finish | None = None
    size_bytes: int = 0
    """Of the JSON, about."""

    def add(self, piece: Piece, logprobs: Mapping[str, bytes]) -> None:
        """``logprobs`` as ``Shape.logprob_lists`` made them of the piece."""
        self.texts.append(piece.text)
        self.size_bytes += len(piece.text)
        for name, inside in logprobs.items():
            if inside:  # not every piece has some
                self.logprobs.setdefault(name, []).append(inside)
                self.size_bytes += len(inside)
        self.finish_reason = piece.finish_reason or self.finish_reason


def _filled(around: Any, lists: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """The JSON of ``around``, in which the lists of these names are empty, with what is in them.

    A name in quotes and a list after it are no part of a string, in which quotes are escaped.
    """
    rest = encode(around)
    for name, inside in lists.items():
        before, begin, rest = rest.partition(b'"%b":[' % name.encode())
        yield before + begin
        yield from inside
    yield rest


def _inside(entries: Iterable[Any]) -> bytes:
    """The JSON of a list, without brackets."""
    return encode(tuple(entries))[1:-1]


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
        self.no_logprobs = self.empty_logprobs()
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
    def empty_logprobs(self) -> Any:
        """What has the lists of log probabilities, all empty; None if the client wants none."""

    @abstractmethod
    def logprob_lists(self, piece: Piece) -> dict[str, bytes]:
        """The JSON of a piece's lists in ``empty_logprobs``, without brackets, by their names."""

    @abstractmethod
    def around(self, number: int, answer: WholeAnswer) -> Any:
        """One choice of the whole response, whose lists of log probabilities are empty."""

    def answer(self, choices: Iterable[WholeAnswer], usage: TokenUsage) -> Iterator[bytes]:
        """The JSON of the whole response, in parts that do not take long to make."""
        around = self.answer_class(
            id=self.id,
            object=self.answer_name,
            created=self.created,
            model=self.model,
            choices=(),
            usage=Usage.of(usage),
        )
        yield from _filled(around, {"choices": self._choices(choices)})

    def _choices(self, choices: Iterable[WholeAnswer]) -> Iterator[bytes]:
        for number, answer in enumerate(choices):
            if number:
                yield b","
            lists = {name: [b",".join(inside)] for name, inside in answer.logprobs.items()}
            yield from _filled(self.around(number, answer), lists)

    def _logprobs(self, piece: Piece) -> bytes:
        """The JSON of those of one piece."""
        if self.no_logprobs is None:
            return b"null"
        lists = {name: [inside] for name, inside in self.logprob_lists(piece).items()}
        return b"".join(_filled(self.no_logprobs, lists))

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
        return self.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (number, encode(piece.text), self._logprobs(piece))
        )

    def finish(self, number: int, reason: Finish) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, encode(reason))
        )

    def empty_logprobs(self) -> ChatLogprobs | None:
        return ChatLogprobs(()) if self.logprobs else None

    def logprob_lists(self, piece: Piece) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        return {"content": _inside(self._entry(entry) for _, entry in piece.logprobs)}

    def around(self, number: int, answer: WholeAnswer) -> ChatChoice:
        return ChatChoice(
            index=number,
            message=AssistantMessage("assistant", "".join(answer.texts)),
            logprobs=self.no_logprobs,
            finish_reason=answer.finish_reason or "stop",
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
        return self._chunk(number, piece.text, self._logprobs(piece))

    def finish(self, number: int, reason: Finish) -> bytes:
        return self._chunk(number, "", finish=encode(reason))

    def around(self, number: int, answer: WholeAnswer) -> CompletionChoice:
        echo = self.echoes[number] if self.echoes else ""
        return CompletionChoice(
            index=number,
            text=echo + "".join(answer.texts),
            logprobs=self.no_logprobs,
            finish_reason=answer.finish_reason or "stop",
        )

    def _chunk(
        self, number: int, text: str, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return self.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (number, encode(text), logprobs, finish)
        )

    def empty_logprobs(self) -> CompletionLogprobs | None:
        if self.logprobs is None:
            return None
        return CompletionLogprobs((), (), () if self.logprobs else None, ())

    def logprob_lists(self, piece: Piece) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        show, entries = self.text.token_text, piece.logprobs
        lists = {
            "tokens": _inside(show(entry.token_id) for _, entry in entries),
            "token_logprobs": _inside(max(entry.logprob, MIN_LOGPROB) for _, entry in entries),
        }
        if self.logprobs:
            lists["top_logprobs"] = _inside(
                {show(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in entry.top}
                for _, entry in entries
            )
        lists["text_offset"] = _inside(offset for offset, _ in entries)
        return lists
