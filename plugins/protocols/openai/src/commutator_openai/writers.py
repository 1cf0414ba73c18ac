"""Writes answers of chat and completions: events become chunks of a stream, or one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from attrs import define, field

from commutator import TokenLogprob
from commutator.contract.answer import (
    AnswerEvent,
    AnswerWriter,
    Batch,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Failure,
    Finish,
    FinishKind,
    ReasoningContent,
    Usage,
)
from commutator.frontend import Plan
from commutator_openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    TokenLogprobs,
    TopLogprob,
    error_body,
    usage_of,
)

__all__ = ["MIN_LOGPROB", "ChatWriter", "CompletionWriter", "event", "stream_failed"]

encode = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_FINISH: Mapping[FinishKind, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "refusal": "content_filter",
}
_FINISH_OF_NAMED: Mapping[FinishKind, FinishReason] = {**_FINISH, "tool_calls": "stop"}
"""The client knows that the tool it named is called: OpenAI's API does not say so again."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


_DONE = event(b"[DONE]")


def stream_failed(failure: Failure) -> bytes:
    """The event that ends a stream which fails."""
    return event(error_body(failure))


@define
class _Call:
    """A call of a tool, as far as it has come."""

    id: str
    name: str
    arguments: list[str] = field(factory=list)
    ended: bool = False

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@define
class _WholeAnswer:
    """One answer that is not streamed, as far as it has come."""

    texts: list[str] = field(factory=list)
    reasoning: list[str] = field(factory=list)
    calls: dict[int, _Call] = field(factory=dict)
    logprobs: dict[str, list[bytes]] = field(factory=dict)
    """The JSON of lists, without brackets, by the name of the list."""
    finish_reason: FinishReason = "stop"
    size_bytes: int = 0
    """Of the JSON, about."""

    def keep(self, one: AnswerEvent) -> None:
        """Add reasoning, or a part of a call."""
        if type(one) is ReasoningContent:
            self.reasoning.append(one.text)
            self.size_bytes += len(one.text)
        elif type(one) is CallStart:
            self.calls[one.call] = _Call(one.id, one.name)
        elif type(one) is CallArguments:
            self.calls[one.call].arguments.append(one.text)
            self.size_bytes += len(one.text)
        elif type(one) is CallEnd:
            self.calls[one.call].ended = True


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


class _Writer(AnswerWriter):
    """The JSON around one request's events; ``logprobs`` None or False leaves those out."""

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
        self._finishes = _FINISH if plan.forced != "named" else _FINISH_OF_NAMED
        self.no_logprobs = self.empty_logprobs()
        self._begun: set[int] = set()
        self._count = len(plan.requests)
        self._answers: list[_WholeAnswer] = []
        common = encode(
            {"id": self.id, "object": self.chunk_name, "created": self.created, "model": self.model}
        )
        self._head = b"data: " + common[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def stream(self, batch: Batch) -> bytes:
        chunks = []
        for number, one in batch:
            if number not in self._begun:
                self._begun.add(number)
                chunks.append(self.first(number))
            if type(one) is Content:
                if one.text or one.logprobs:
                    chunks.append(self.content(number, one))
            elif type(one) is Finish:
                chunks.append(self.finish(number, encode(self._finishes[one.reason])))
            else:
                chunks.append(self.other(number, one))
        return b"".join(chunks)

    def stream_end(self, usage: Usage) -> bytes:
        if not self.include_usage:
            return _DONE
        return self._head + b'],"usage":' + encode(usage_of(usage)) + b"}\n\n" + _DONE

    def stream_failed(self, failure: Failure) -> bytes:
        return stream_failed(failure)

    def keep(self, batch: Batch) -> None:
        if not self._answers:  # a stream needs none
            self._answers = [_WholeAnswer() for _ in range(self._count)]
        for number, one in batch:
            answer = self._answers[number]
            if type(one) is Content:
                answer.texts.append(one.text)
                answer.size_bytes += len(one.text)
                for name, inside in self.logprob_lists(one).items():
                    if inside:  # not every piece has some
                        answer.logprobs.setdefault(name, []).append(inside)
                        answer.size_bytes += len(inside)
            elif type(one) is Finish:
                answer.finish_reason = self._finishes[one.reason]
            else:
                answer.keep(one)

    @property
    def kept_bytes(self) -> int:
        return sum(answer.size_bytes for answer in self._answers)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        around = self.answer_class(
            id=self.id,
            object=self.answer_name,
            created=self.created,
            model=self.model,
            choices=(),
            usage=usage_of(usage),
        )
        yield from _filled(around, {"choices": self._choices()})

    def _choices(self) -> Iterator[bytes]:
        self._answers.reverse()
        number = 0
        while self._answers:  # each is given up once it is encoded
            answer = self._answers.pop()
            if number:
                yield b","
            lists = {name: [b",".join(inside)] for name, inside in answer.logprobs.items()}
            yield from _filled(self.around(number, answer), lists)
            number += 1

    def _logprobs(self, content: Content) -> bytes:
        """The JSON of those of one event."""
        if self.no_logprobs is None:
            return b"null"
        lists = {name: [inside] for name, inside in self.logprob_lists(content).items()}
        return b"".join(_filled(self.no_logprobs, lists))

    def chunk(self, choice: bytes) -> bytes:
        """A chunk around the JSON of one choice."""
        return self._head + choice + self._tail

    @abstractmethod
    def first(self, number: int) -> bytes:
        """The chunk before an answer's first event, or nothing."""

    @abstractmethod
    def content(self, number: int, content: Content) -> bytes:
        """The chunk of text or log probabilities."""

    @abstractmethod
    def other(self, number: int, one: Any) -> bytes:
        """The chunk of reasoning or a part of a call, or nothing."""

    @abstractmethod
    def finish(self, number: int, reason: bytes) -> bytes:
        """An answer's last chunk."""

    @abstractmethod
    def empty_logprobs(self) -> Any:
        """What has the lists of log probabilities, all empty; None if the client wants none."""

    @abstractmethod
    def logprob_lists(self, content: Content) -> dict[str, bytes]:
        """The JSON of its lists in ``empty_logprobs``, without brackets, by their names."""

    @abstractmethod
    def around(self, number: int, answer: _WholeAnswer) -> Any:
        """One choice of the whole answer, whose lists of log probabilities are empty."""


class ChatWriter(_Writer):
    """Messages with a role."""

    answer_class = ChatCompletion
    answer_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first(self, number: int) -> bytes:
        return self._delta(number, b'{"role":"assistant","content":"","refusal":null}')

    def content(self, number: int, content: Content) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (number, encode(content.text), self._logprobs(content))
        )

    def other(self, number: int, one: Any) -> bytes:
        if type(one) is ReasoningContent:
            return self._delta(number, encode({"reasoning_content": one.text}))
        if type(one) is CallStart:
            call = {"index": one.call, **_Call(one.id, one.name).plain()}
        elif type(one) is CallArguments:
            call = {"index": one.call, "function": {"arguments": one.text}}
        else:
            return b""
        return self._delta(number, encode({"tool_calls": [call]}))

    def _delta(self, number: int, delta: bytes) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)
        )

    def finish(self, number: int, reason: bytes) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, reason)
        )

    def empty_logprobs(self) -> ChatLogprobs | None:
        return ChatLogprobs(()) if self.logprobs else None

    def logprob_lists(self, content: Content) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        return {"content": _inside(self._entry(entry) for _, entry in content.logprobs)}

    def around(self, number: int, answer: _WholeAnswer) -> ChatChoice:
        text = "".join(answer.texts)
        message: Any = AssistantMessage("assistant", text)
        calls = [call.plain() for call in answer.calls.values() if call.ended]
        if calls or answer.reasoning:
            message = {"role": "assistant", "content": text or None, "refusal": None}
            if answer.reasoning:
                message["reasoning_content"] = "".join(answer.reasoning)
            if calls:
                message["tool_calls"] = calls
        return ChatChoice(
            index=number,
            message=message,
            logprobs=self.no_logprobs,
            finish_reason=answer.finish_reason,
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


class CompletionWriter(_Writer):
    """Plain text, with the prompt before it when it is to be echoed. It has no calls."""

    answer_class = Completion
    answer_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def first(self, number: int) -> bytes:
        return self._chunk(number, self.echoes[number]) if self.echoes else b""

    def content(self, number: int, content: Content) -> bytes:
        return self._chunk(number, content.text, self._logprobs(content))

    def other(self, number: int, one: Any) -> bytes:
        return b""

    def finish(self, number: int, reason: bytes) -> bytes:
        return self._chunk(number, "", finish=reason)

    def around(self, number: int, answer: _WholeAnswer) -> CompletionChoice:
        echo = self.echoes[number] if self.echoes else ""
        return CompletionChoice(
            index=number,
            text=echo + "".join(answer.texts),
            logprobs=self.no_logprobs,
            finish_reason=answer.finish_reason,
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

    def logprob_lists(self, content: Content) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        show, entries = self.text.token_text, content.logprobs
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
