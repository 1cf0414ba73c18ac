"""Writes answers of chat and completions: events become chunks of a stream, or one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
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
    PromptLogprobs,
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
    PromptLogprob,
    TokenLogprobs,
    TopLogprob,
    error_body,
    usage_of,
)

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


@define(kw_only=True)
class Shown:
    """What an answer is to have beside its text."""

    include_usage: bool = False
    continuous_usage: bool = False
    """Whether each chunk tells the usage so far; only with ``include_usage``."""
    logprobs: int | bool | None = None
    """None or False: none."""
    named_tokens: bool = False
    """Whether the alternatives are those of tokens that the client named."""
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    reasoning: bool = True
    before: tuple[str, ...] = ()
    """By conversation, the text that answers begin with."""


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
    prompt_logprobs: bytes = b""
    """The JSON of that list, without brackets."""
    token_ids: list[int] = field(factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None
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
    """The JSON around one request's events."""

    ping = b": ping\n\n"
    answer_class: ClassVar[Callable[..., Any]]
    answer_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, request_id: str, plan: Plan, *, shown: Shown) -> None:
        self.id = self.id_prefix + request_id
        self.model = plan.name
        self.created = int(time.time())
        self.shown = shown
        self.plan = plan
        self.echoes = plan.echoes
        self.text = plan.text
        self.logprobs = shown.logprobs
        self._finishes = _FINISH if plan.forced != "named" else _FINISH_OF_NAMED
        self.no_logprobs = self.empty_logprobs()
        self._begun: set[int] = set()
        self._told: set[int] = set()
        """The answers whose prompt's tokens were sent."""
        self._count = len(plan.requests)
        self._answers: list[_WholeAnswer] = []
        common = encode(
            {"id": self.id, "object": self.chunk_name, "created": self.created, "model": self.model}
        )
        self._head = b"data: " + common[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shown.include_usage else b"]}\n\n"
        self._generated = [0] * self._count
        """Tokens of each answer, where each chunk tells them."""

    def stream(self, batch: Batch) -> bytes:
        chunks = []
        finished = False
        for place, (number, one) in enumerate(batch):
            if number not in self._begun:
                self._begun.add(number)
                chunks.append(self.first(number))
            if type(one) is Content:
                self._generated[number] += len(one.token_ids)
                if one.text or one.logprobs or (self.shown.token_ids and one.token_ids):
                    ending = self._ending(batch, place + 1, number)
                    finished = ending is not None
                    chunks.append(self.content(number, one, ending))
            elif type(one) is Finish:
                if not finished:
                    chunks.append(self.finish(number, one))
                finished = False
            elif type(one) is PromptLogprobs:
                chunks.append(self.prompt(number, one))
            elif self.shown.reasoning or type(one) is not ReasoningContent:
                chunks.append(self.other(number, one))
        return b"".join(chunks)

    @staticmethod
    def _ending(batch: Batch, place: int, number: int) -> Finish | None:
        """The end of the answer, if it comes right after its last text."""
        if place < len(batch) and batch[place][0] == number:
            following = batch[place][1]
            return following if type(following) is Finish else None
        return None

    def stream_end(self, usage: Usage) -> bytes:
        if not self.shown.include_usage:
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
                if self.shown.token_ids:
                    answer.token_ids += one.token_ids
                for name, inside in self.logprob_lists(number, one).items():
                    if inside:  # not every piece has some
                        answer.logprobs.setdefault(name, []).append(inside)
                        answer.size_bytes += len(inside)
            elif type(one) is Finish:
                answer.finish_reason = self._finishes[one.reason]
                answer.stop_reason = one.stop
            elif type(one) is PromptLogprobs:
                self.keep_prompt(number, answer, one)
            elif self.shown.reasoning or type(one) is not ReasoningContent:
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
            **self.beside_choices(),
        )
        lists: dict[str, Iterable[bytes]] = {"choices": self._choices()}
        yield from _filled(around, {**self.lists_beside_choices(), **lists})

    def beside_choices(self) -> dict[str, Any]:
        """Further fields of the whole answer; its lists of log probabilities are empty."""
        return {}

    def lists_beside_choices(self) -> Mapping[str, Iterable[bytes]]:
        """What is in these lists, as JSON without brackets."""
        return {}

    def _choices(self) -> Iterator[bytes]:
        self._answers.reverse()
        number = 0
        while self._answers:  # each is given up once it is encoded
            answer = self._answers.pop()
            if number:
                yield b","
            lists = {name: [b",".join(inside)] for name, inside in answer.logprobs.items()}
            if answer.prompt_logprobs:
                lists["prompt_logprobs"] = [answer.prompt_logprobs]
            yield from _filled(self.around(number, answer), lists)
            number += 1

    def _logprobs(self, number: int, content: Content) -> bytes:
        """The JSON of those of one event."""
        if self.no_logprobs is None:
            return b"null"
        lists = {name: [inside] for name, inside in self.logprob_lists(number, content).items()}
        return b"".join(_filled(self.no_logprobs, lists))

    def chunk(self, number: int, choice: bytes, more: bytes = b"") -> bytes:
        """A chunk around the JSON of one choice; ``more`` are fields beside the choices."""
        if not self.shown.continuous_usage:
            return self._head + choice + (b"]" + more + self._tail[1:] if more else self._tail)
        prompt = len(self.plan.requests[number].token_ids)
        usage = Usage(
            prompt_tokens=prompt, completion_tokens=self._generated[number], cached_tokens=0
        )
        told = b',"usage":' + encode(usage_of(usage)) + b"}\n\n"
        return self._head + choice + b"]" + more + told

    def name(self, token_id: int) -> str:
        """What log probabilities call a token."""
        return (
            f"token_id:{token_id}" if self.shown.tokens_as_ids else self.text.token_text(token_id)
        )

    def prompt_lists(self, entries: Iterable[TokenLogprob]) -> bytes:
        """The JSON of the prompt's log probabilities, as vLLM has them, without brackets."""
        return _inside([None, *map(self._prompt_entry, entries)])

    def _prompt_entry(self, entry: TokenLogprob) -> dict[str, PromptLogprob]:
        chosen = (entry.token_id, entry.logprob, entry.rank)
        others = ((one, logprob, rank) for rank, (one, logprob) in enumerate(entry.top, 1))
        return {
            str(one): PromptLogprob(max(logprob, MIN_LOGPROB), rank, self.name(one))
            for one, logprob, rank in (chosen, *others)
        }

    def finished(self, one: Finish | None) -> bytes:
        """The JSON of why an answer ended, and of what ended it, but for braces."""
        if one is None:
            return b'"finish_reason":null'
        reason, stop = encode(self._finishes[one.reason]), encode(one.stop)
        return b'"finish_reason":%b,"stop_reason":%b' % (reason, stop)

    def tokens(self, content: Content) -> bytes:
        """The JSON of the tokens of a chunk as a further field; nothing where nobody asked."""
        return b',"token_ids":' + encode(content.token_ids) if self.shown.token_ids else b""

    @abstractmethod
    def first(self, number: int) -> bytes:
        """The chunk before an answer's first event, or nothing."""

    @abstractmethod
    def content(self, number: int, content: Content, ending: Finish | None) -> bytes:
        """The chunk of text or log probabilities, the last one if the answer ends with it."""

    @abstractmethod
    def prompt(self, number: int, one: PromptLogprobs) -> bytes:
        """The chunk of the prompt's log probabilities, or nothing."""

    @abstractmethod
    def keep_prompt(self, number: int, answer: _WholeAnswer, one: PromptLogprobs) -> None:
        """Keep the prompt's log probabilities."""

    @abstractmethod
    def other(self, number: int, one: Any) -> bytes:
        """The chunk of reasoning or a part of a call, or nothing."""

    @abstractmethod
    def finish(self, number: int, one: Finish) -> bytes:
        """An answer's last chunk."""

    @abstractmethod
    def empty_logprobs(self) -> Any:
        """What has the lists of log probabilities, all empty; None if the client wants none."""

    @abstractmethod
    def logprob_lists(self, number: int, content: Content) -> dict[str, bytes]:
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
        delta = b'{"role":"assistant","content":%b,"refusal":null}' % encode(self._before(number))
        more = b""
        if self.shown.token_ids:
            ids = self.plan.requests[number].token_ids
            more = b',"prompt_token_ids":' + encode(tuple(ids))
        return self._delta(number, delta, more)

    def _before(self, number: int) -> str:
        before = self.shown.before
        return before[number // self.plan.answers_per_prompt] if before else ""

    def content(self, number: int, content: Content, ending: Finish | None) -> bytes:
        return self.chunk(
            number,
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,%b%b}'
            % (
                number,
                encode(content.text),
                self._logprobs(number, content),
                self.finished(ending),
                self.tokens(content),
            ),
        )

    def prompt(self, number: int, one: PromptLogprobs) -> bytes:
        return b""  # not asked for in streams

    def keep_prompt(self, number: int, answer: _WholeAnswer, one: PromptLogprobs) -> None:
        if not number:
            self._prompt_logprobs = self.prompt_lists(one.entries)

    _prompt_logprobs: bytes | None = None

    def beside_choices(self) -> dict[str, Any]:
        ids = self.plan.requests[0].token_ids if self.shown.token_ids else None
        return {
            "prompt_logprobs": None if self._prompt_logprobs is None else (),
            "prompt_token_ids": None if ids is None else tuple(ids),
        }

    def lists_beside_choices(self) -> Mapping[str, Iterable[bytes]]:
        kept = self._prompt_logprobs
        return {} if kept is None else {"prompt_logprobs": [kept]}

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

    def _delta(self, number: int, delta: bytes, more: bytes = b"") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)
        return self.chunk(number, choice, more)

    def finish(self, number: int, one: Finish) -> bytes:
        choice = b'{"index":%d,"delta":{},"logprobs":null,%b}' % (number, self.finished(one))
        return self.chunk(number, choice)

    def empty_logprobs(self) -> ChatLogprobs | None:
        return ChatLogprobs(()) if self.logprobs else None

    def logprob_lists(self, number: int, content: Content) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        return {"content": _inside(self._entry(entry) for _, entry in content.logprobs)}

    def around(self, number: int, answer: _WholeAnswer) -> ChatChoice:
        text = self._before(number) + "".join(answer.texts)
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
            stop_reason=answer.stop_reason,
            token_ids=tuple(answer.token_ids) if self.shown.token_ids else None,
        )

    def _entry(self, entry: TokenLogprob) -> TokenLogprobs:
        chosen = self._top(entry.token_id, entry.logprob)
        top = entry.top
        if self.shown.named_tokens:
            top = tuple({entry.token_id: entry.logprob, **dict(top)}.items())
        alternatives = tuple(self._top(token_id, logprob) for token_id, logprob in top)
        return TokenLogprobs(chosen.token, chosen.logprob, chosen.bytes, alternatives)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            self.name(token_id),
            max(logprob, MIN_LOGPROB),
            tuple(self.text.token_bytes(token_id)),
        )


class CompletionWriter(_Writer):
    """Plain text, with the prompt before it when it is to be echoed. It has no calls."""

    answer_class = Completion
    answer_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def first(self, number: int) -> bytes:
        """With the prompt's log probabilities where they are wanted, so that it waits for them."""
        if not self.echoes or self.no_logprobs is not None:
            return b""
        return self._chunk(number, self.echoes[number])

    def content(self, number: int, content: Content, ending: Finish | None) -> bytes:
        logprobs = self._logprobs(number, content)
        return self._chunk(number, content.text, logprobs, ending, self.tokens(content))

    def prompt(self, number: int, one: PromptLogprobs) -> bytes:
        if not self.echoes or self.no_logprobs is None:
            return b""
        lists = {name: [inside] for name, inside in self._echoed(number, one).items()}
        logprobs = b"".join(_filled(self.no_logprobs, lists))
        return self._chunk(number, self.echoes[number], logprobs, None, self.tokens(Content("")))

    def keep_prompt(self, number: int, answer: _WholeAnswer, one: PromptLogprobs) -> None:
        if self.echoes and self.no_logprobs is not None:
            for name, inside in self._echoed(number, one).items():
                answer.logprobs.setdefault(name, []).append(inside)
                answer.size_bytes += len(inside)
        if self.shown.prompt_logprobs:
            answer.prompt_logprobs = self.prompt_lists(one.entries)
            answer.size_bytes += len(answer.prompt_logprobs)

    def _echoed(self, number: int, one: PromptLogprobs) -> dict[str, bytes]:
        """The lists of the prompt's tokens; of the first one nothing is known."""
        token_ids = self.plan.requests[number].token_ids
        detokenizer = self.text.detokenizer(skip_special_tokens=False)
        lengths = (len(detokenizer.push((token_id,))) for token_id in token_ids)
        offsets = accumulate(lengths, initial=0)
        return {
            "tokens": _inside(map(self.name, token_ids)),
            "token_logprobs": _inside(
                [None, *(max(entry.logprob, MIN_LOGPROB) for entry in one.entries)]
            ),
            "top_logprobs": _inside([None, *map(self._top, one.entries)]),
            "text_offset": _inside(offset for offset, _ in zip(offsets, token_ids, strict=False)),
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The token itself comes first: it may be none of the likeliest."""
        found = {self.name(entry.token_id): max(entry.logprob, MIN_LOGPROB)}
        for token_id, logprob in entry.top:
            found.setdefault(self.name(token_id), max(logprob, MIN_LOGPROB))
        return found

    def other(self, number: int, one: Any) -> bytes:
        return b""

    def finish(self, number: int, one: Finish) -> bytes:
        logprobs = b"null" if self.no_logprobs is None else encode(self.no_logprobs)
        return self._chunk(number, "", logprobs, one, self.tokens(Content("")))

    def around(self, number: int, answer: _WholeAnswer) -> CompletionChoice:
        echo = self.echoes[number] if self.echoes else ""
        ids = self.shown.token_ids
        return CompletionChoice(
            index=number,
            text=echo + "".join(answer.texts),
            logprobs=self.no_logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_logprobs=() if self.shown.prompt_logprobs else None,
            prompt_token_ids=tuple(self.plan.requests[number].token_ids) if ids else None,
            token_ids=tuple(answer.token_ids) if ids else None,
        )

    def _chunk(
        self,
        number: int,
        text: str,
        logprobs: bytes = b"null",
        ending: Finish | None = None,
        more: bytes = b"",
    ) -> bytes:
        if self.shown.token_ids and number not in self._told:
            self._told.add(number)
            more += b',"prompt_token_ids":' + encode(tuple(self.plan.requests[number].token_ids))
        return self.chunk(
            number,
            b'{"index":%d,"text":%b,"logprobs":%b,%b%b}'
            % (number, encode(text), logprobs, self.finished(ending), more),
        )

    def empty_logprobs(self) -> CompletionLogprobs | None:
        if self.logprobs is None:
            return None
        return CompletionLogprobs((), (), (), ())

    def logprob_lists(self, number: int, content: Content) -> dict[str, bytes]:
        if self.no_logprobs is None:
            return {}
        entries = content.logprobs
        before = len(self.echoes[number]) if self.echoes else 0
        return {
            "tokens": _inside(self.name(entry.token_id) for _, entry in entries),
            "token_logprobs": _inside(max(entry.logprob, MIN_LOGPROB) for _, entry in entries),
            "top_logprobs": _inside(self._top(entry) for _, entry in entries),
            "text_offset": _inside(before + offset for offset, _ in entries),
        }
