"""Families that divide the whole answer: harmony's channels, and Kimi K3's elements."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from html import unescape

from commutator.contract.conversation import Conversation
from commutator_parsers.calls import Calls, IdStyle, json_of
from commutator_parsers.grammars import alternatives
from commutator_parsers.parser import EventParser
from commutator_parsers.reader import Malformed, Reader, Steps, json_text

_START, _MESSAGE, _CHANNEL, _CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(\S+)")
_HEADER = 512


class HarmonyParser(EventParser):
    """gpt-oss: messages with a header each, which tells the channel and the recipient."""

    def __init__(
        self, conversation: Conversation | None, ids: IdStyle, specials: Collection[str]
    ) -> None:
        super().__init__(specials)
        if conversation is not None and conversation.tools:
            self.calls = Calls(conversation, ids, self.events)
        self._told: set[str] = set()
        """What has text already: "content", "reasoning"."""

    def _run(self) -> Steps:
        yield
        reader = self.reader
        while True:
            while not reader.text and not reader.done:
                yield
            if not reader.text:
                return
            reader.keep()
            try:
                yield from self._message()
            except Malformed:
                if self.reason == "length" and reader.done:
                    return
                reader.give_back()
                yield from self._garbled()

    def _garbled(self) -> Steps:
        """A header that is none is text, up to the next message."""
        reader = self.reader
        pattern = alternatives(*_ENDS, _START)
        match = reader.find(pattern, 1)
        while match is None and not reader.done:
            yield
            match = reader.find(pattern, 1)
        if match is None:
            self.content(reader.take(len(reader.text)))
            return
        text = reader.take(match.start() if match[0] == _START else match.end())
        self.content(text)

    def _message(self) -> Steps:
        reader = self.reader
        stops = (_MESSAGE, *_ENDS)
        header, found = yield from reader.until(alternatives(*stops), stops, _HEADER)
        if found != _MESSAGE:
            raise Malformed
        recipient = _RECIPIENT.search(header.replace(_CHANNEL, " ").replace(_CONSTRAIN, " "))
        channel = header.rpartition(_CHANNEL)[2].split() if _CHANNEL in header else []
        name = "" if recipient is None else recipient[1]
        tool = name.removeprefix("functions.")
        if name and name != "assistant":
            if self.calls is not None and tool in self.calls.tools:
                yield from self._call(self.calls, tool)
                return
            reader.forget()
            yield from self._body(lambda _: None)  # for a tool of the model's makers
            return
        reader.forget()
        kind = "reasoning" if channel[:1] == ["analysis"] else "content"
        again = kind in self._told
        self._told.add(kind)
        say = self.reasoning if kind == "reasoning" else self.content
        if again:
            say("\n")
        yield from self._body(lambda text: say(reader.without_tokens(text)))

    def _call(self, calls: Calls, name: str) -> Steps:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.literal(*_ENDS)):
            calls.start(name).end()
            reader.forget()
            return
        if not reader.text.startswith("{"):
            if not reader.done or reader.text or self.reason == "length":
                raise Malformed
            calls.start(name).end()
            return
        call = calls.start(name)
        yield from reader.json(call.arguments)
        yield from reader.space()
        ended = yield from reader.literal(*_ENDS)
        if not ended and reader.text and not reader.text.startswith(_START):
            raise Malformed
        call.end()
        reader.forget()

    def _body(self, say: object) -> Steps:
        """Read a message's text. What ends it is followed by another message, or by nothing."""
        assert callable(say)
        reader = self.reader
        pattern = alternatives(*_ENDS)
        at = 0
        while True:
            match = reader.find(pattern, at)
            safe = reader.unfinished(_ENDS, at) if match is None else match.start()
            ends: bool | None = False
            if match is not None:
                rest = reader.text[match.end() : match.end() + len(_START)]
                ends = rest == _START or (reader.done and not rest)
                if not ends:
                    ends = None if _START.startswith(rest) and not reader.done else False
                    if ends is False:
                        at = match.end()
                        continue
            if safe:
                say(reader.take(safe))
            at = 0
            if match is not None and ends:
                reader.take(len(match[0]))
                return
            if reader.done:
                return
            yield


_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


class ElementParser(EventParser):
    """Kimi K3: elements, which tokens open and close, for reasoning, text, tools and arguments."""

    def __init__(
        self,
        conversation: Conversation | None,
        ids: IdStyle,
        specials: Collection[str],
        inside: str | None,
    ) -> None:
        """``inside`` is the element that the prompt has opened."""
        self._inside = inside
        if inside == "think":
            self.thinks_until = f"{_CLOSE}think{_SEP}{_OPEN}response{_SEP}"
        super().__init__(specials)
        if conversation is not None and conversation.tools:
            self.calls = Calls(conversation, ids, self.events)

    def _run(self) -> Steps:
        yield
        if self._inside is not None:
            yield from self._text(self._inside)
        while True:
            reader = self.reader
            reader.keep()
            found = yield from reader.literal(_OPEN, _CLOSE)
            if not found:
                reader.forget()
                if reader.text:
                    yield from self._text("")
                if reader.done and not reader.text:
                    return
                continue
            try:
                yield from self._element(found)
            except Malformed:
                if reader.done and self.reason == "length":
                    return
                reader.give_back()
                self.content(reader.take(len(found)))

    def _element(self, found: str) -> Steps:
        """What follows the beginning or the end of an element."""
        reader = self.reader
        name, _ = yield from self._tag(reader)
        if found == _OPEN and name == "tools":
            if self.calls is None:
                raise Malformed
            yield from self._tools(self.calls)
        elif found == _OPEN and name in {"think", "response"}:
            reader.forget()
            yield from self._text(name)
        reader.forget()

    def _tag(self, reader: Reader) -> Generator[None, None, tuple[str, dict[str, str]]]:
        text, _ = yield from reader.until(alternatives(_SEP), (_SEP,), _HEADER)
        name, _, rest = text.strip().partition(" ")
        return name, {key: unescape(value) for key, value in _ATTRIBUTE.findall(rest)}

    def _text(self, element: str) -> Steps:
        """Read text up to the element's end, or to where another one begins."""
        reader = self.reader
        say = self.reasoning if element == "think" else self.content
        close = f"{_CLOSE}{element}{_SEP}"
        others = tuple(
            f"{_OPEN}{name}" for name in ("think", "response", "tools") if name != element
        )
        literals = (close, *others)
        pattern = alternatives(*literals)
        while True:
            match = pattern.search(reader.text)
            while match is not None and not reader.is_marker(
                match[0][: match[0].index(">") + 1], match.start()
            ):
                match = pattern.search(reader.text, match.start() + 1)
            safe = reader.unfinished(literals) if match is None else match.start()
            if safe:
                say(reader.without_tokens(reader.take(safe)))
            if match is not None:
                if match[0] == close:
                    reader.take(len(close))
                return
            if reader.done:
                return
            yield

    def _tools(self, calls: Calls) -> Steps:
        reader = self.reader
        while True:
            found = yield from reader.expect(_OPEN, _CLOSE)
            name, attributes = yield from self._tag(reader)
            if found == _CLOSE:
                return
            if name != "call":
                raise Malformed
            call = calls.start(attributes.get("tool", ""))
            while (yield from reader.expect(_OPEN, _CLOSE)) == _OPEN:
                _, attributes = yield from self._tag(reader)
                types = call.key(attributes.get("key", ""))
                if stated := attributes.get("type"):
                    types = frozenset({stated})
                yield from self._argument(call, types)
            yield from self._tag(reader)
            call.end()
            reader.forget()
            reader.keep()

    def _argument(self, call: object, types: frozenset[str]) -> Steps:
        """An argument's end is followed by another one, or by its call's end."""
        reader = self.reader
        end = f"{_CLOSE}argument{_SEP}"
        follows = (f"{_OPEN}argument", f"{_CLOSE}call")
        pieces: list[str] = []
        streams = types == {"string"}
        write = call.arguments  # type: ignore[attr-defined]
        if streams:
            write('"')
        at = 0
        while True:
            found = reader.text.find(end, at)
            safe = reader.unfinished((end,), at) if found < 0 else found
            verdict: bool | None = False
            if found >= 0:
                verdict = reader.is_marker(_CLOSE, found)
                if verdict:
                    rest = reader.text[found + len(end) :][:20]
                    verdict = any(rest.startswith(one) for one in follows)
                    if (
                        not verdict
                        and not reader.done
                        and any(one.startswith(rest) for one in follows)
                    ):
                        verdict = None
                if verdict is False:
                    at = found + 1
                    continue
            if safe:
                piece = reader.take(safe)
                if streams:
                    write(json_text(piece))
                else:
                    pieces.append(piece)
            at = 0
            if verdict:
                reader.take(len(end))
                break
            yield from reader.more()
        write('"' if streams else json_of("".join(pieces), types))
