"""Reads an answer of one family: reasoning, text, and calls in one grammar."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Sequence
from contextlib import suppress
from functools import cache

from attrs import frozen

from commutator.contract.answer import AnswerEvent, Content, FinishKind, ReasoningContent
from commutator.contract.conversation import Conversation
from commutator.contract.parser import AnswerParser
from commutator_parsers.calls import Calls, IdStyle
from commutator_parsers.grammars import Grammar, alternatives
from commutator_parsers.reader import Malformed, Reader, Steps

_WORDS = 2
"""What stands between an opener and a tool's name in any format, at most."""


@frozen(kw_only=True)
class Thinking:
    """How a family writes what it thinks."""

    pairs: tuple[tuple[str, str], ...]
    """(marker that begins, marker that ends), each as the family writes them."""
    begun: bool = False
    """The model thinks from the start, and neither it nor the prompt writes a beginning."""
    ended_by_calls: bool = False
    """The model goes from thinking straight to a call, without the end."""
    anywhere: bool = False
    """It may think again after text."""


class EventParser(AnswerParser):
    """Runs a generator that reads the text and adds events."""

    def __init__(self, specials: Collection[str]) -> None:
        self.reader = Reader(specials)
        self.events: list[AnswerEvent] = []
        self.reason: FinishKind = "stop"
        self.calls: Calls | None = None
        self._running = self._run()
        next(self._running)

    def _run(self) -> Steps:
        raise NotImplementedError

    def feed(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> Sequence[AnswerEvent]:
        """As of ``AnswerParser``."""
        self.reader.push(text, tokens)
        self._running.send(None)
        return self._new()

    def finish(self, reason: FinishKind) -> tuple[Sequence[AnswerEvent], FinishKind]:
        """As of ``AnswerParser``."""
        self.reader.done, self.reason = True, reason
        with suppress(StopIteration):
            self._running.send(None)
        if reason == "stop" and self.calls is not None and self.calls.ended:
            reason = "tool_calls"
        return self._new(), reason

    def _new(self) -> Sequence[AnswerEvent]:
        events = self.events
        found = events[:]
        events.clear()
        return found

    def content(self, text: str) -> None:
        """Add text of the answer."""
        last = self.events[-1] if self.events else None
        if type(last) is Content:
            last.text += text
        elif text:
            self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        last = self.events[-1] if self.events else None
        if type(last) is ReasoningContent:
            last.text += text
        elif text:
            self.events.append(ReasoningContent(text))


@frozen(kw_only=True)
class _Markers:
    """What a family's text is searched for."""

    begins: tuple[str, ...]
    """Of reasoning."""
    ends: tuple[str, ...]
    calls: tuple[str, ...]
    whole: tuple[str, ...]
    """All that count wherever they stand."""
    beginnings: frozenset[str]
    """Those with which others begin."""
    pattern: re.Pattern[str]
    quick: re.Pattern[str]
    """Finds nothing in text that neither has a marker nor may be the beginning of one."""


@cache
def _markers(
    thinking: Thinking | None,
    silent: tuple[str, ...],
    openers: tuple[str, ...],
    line_openers: tuple[str, ...],
) -> _Markers:
    pairs = () if thinking is None else thinking.pairs
    begins, ends = tuple(one for one, _ in pairs), tuple(one for _, one in pairs)
    whole = (*begins, *ends, *openers, *silent)
    everything = (*whole, *line_openers)
    firsts = re.escape("".join(sorted({one[0] for one in everything})))
    line = r"|\n" if line_openers else ""
    return _Markers(
        begins=begins,
        ends=ends,
        calls=(*openers, *line_openers),
        whole=whole,
        beginnings=frozenset(
            one for one in everything if any(o != one and o.startswith(one) for o in whole)
        ),
        pattern=alternatives(*everything),
        quick=re.compile((f"[{firsts}]|" if firsts else "") + r"\s\Z" + line),
    )


class FamilyParser(EventParser):
    """Text with reasoning before it, and calls of one grammar within it."""

    def __init__(
        self,
        thinking: Thinking | None,
        grammar: Grammar | None,
        silent: tuple[str, ...],
        ids: IdStyle,
        conversation: Conversation | None,
        begins_thinking: str | None,
        specials: Collection[str],
    ) -> None:
        """``begins_thinking`` is the marker that the prompt has written already, if it has.

        ``silent`` are markers that stand around the text. ``grammar`` is None for no calls.
        """
        self._thinking = thinking
        self._grammar = grammar
        self._silent = silent
        self._begins_thinking = begins_thinking
        if thinking is not None and begins_thinking is not None:
            self.thinks_until = dict(thinking.pairs)[begins_thinking]
        self._spaced = grammar is None or grammar.spaced
        self._openers = () if grammar is None else grammar.openers
        self._line_openers = () if grammar is None else grammar.line_openers
        self._markers = _markers(thinking, silent, self._openers, self._line_openers)
        self._thought = self._wrote = False
        self._line_begins = True
        self._quick: re.Pattern[str] | None = None
        """While set, text in which it finds nothing is passed on at once."""
        self._quick_is_content = True
        super().__init__(specials)
        self.calls = None
        if grammar is not None and conversation is not None:
            self.calls = Calls(conversation, ids, self.events)

    def feed(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> Sequence[AnswerEvent]:
        """As of ``AnswerParser``."""
        quick = self._quick
        if quick is not None and not tokens and quick.search(text) is None and text:
            self.reader.skip(len(text))
            if self._quick_is_content:
                self._line_begins = False
                return (Content(text),)
            return (ReasoningContent(text),)
        self._quick = None
        return super().feed(text, tokens)

    def _run(self) -> Steps:
        yield
        if self._begins_thinking is not None:
            yield from self._think(self._begins_thinking)
        yield from self._answer()

    def _wait(self, quick: re.Pattern[str] | None, is_content: bool) -> Steps:
        if quick is not None and not self.reader.text:
            self._quick, self._quick_is_content = quick, is_content
        yield

    def _think(self, begin: str) -> Steps:
        """Read reasoning up to its end."""
        assert self._thinking is not None
        reader = self.reader
        self._thought = True
        end = dict(self._thinking.pairs)[begin]
        by_calls = self._openers if self._thinking.ended_by_calls else ()
        literals = (end, *by_calls)
        pattern = alternatives(*literals)
        quick = re.compile(f"[{re.escape(''.join({one[0] for one in literals}))}]|\\s\\Z")
        yield from reader.space()
        at = 0
        while True:
            match = reader.find(pattern, at)
            safe = reader.unfinished(literals, at) if match is None else match.start()
            if match is not None or not reader.done:
                safe = len(reader.text[:safe].rstrip())
            if match is not None and match[0] != end:
                verdict = self._is_call(match)
                if verdict is None and not reader.done:
                    match = None
                elif not verdict:
                    at = match.end()
                    continue
            if safe:
                text = reader.take(safe)
                self.reasoning(reader.without_tokens(text))
                at = 0
            if match is not None:
                yield from reader.space()
                if match[0] == end:
                    reader.take(len(end))
                return
            if reader.done:
                return
            yield from self._wait(quick, is_content=False)

    def _is_call(self, match: re.Match[str]) -> bool | None:
        """Whether a call of a known tool follows an opener in the reasoning; None: not yet known.

        Looked at without reading: the name of a tool comes soon after the opener.
        """
        if self.calls is None or not self.calls.tools:
            return False
        text = self.reader.text[match.end() : match.end() + 256].lstrip()
        for name in self.calls.tools:
            at = text.find(name)
            if (
                at >= 0
                and len(text[:at].split()) <= _WORDS
                and (not at or not text[at - 1].isspace())
            ):
                return True
        return None if len(text) < 256 and len(text.split()) <= _WORDS else False  # noqa: PLR2004

    def _answer(self) -> Steps:
        """Read text, and what begins at the markers in it, to the end."""
        reader, markers = self.reader, self._markers
        quick = markers.quick
        at = 0
        after_call = False
        while True:
            match = reader.find(markers.pattern, at)
            limit = len(reader.text)
            if match is not None and self._may_grow(match):
                limit, match = match.start(), None
            if match is not None and not self._counts(match[0], match.start()):
                at = match.start() + 1
                continue
            safe = reader.unfinished(markers.whole, at) if match is None else match.start()
            safe = min(safe, limit)
            blank = len(reader.text[:safe].rstrip())
            at = 0
            if match is None:
                cut = safe if reader.done and not (after_call and not blank) else blank
                self._say(cut, after_call)
                after_call = after_call and not cut
                if reader.done:
                    return
                yield from self._wait(None if after_call or not self._wrote else quick, True)
                continue
            found = match[0]
            cut = blank if self._spaced or found in markers.begins else safe
            self._say(cut, after_call)
            after_call = after_call and not cut
            reader.keep()
            opening = match.start() - cut + len(found)
            reader.take(opening)
            if found in markers.calls:
                after_call = yield from self._call(found, opening)
                continue
            reader.forget()
            if found in markers.begins:
                yield from self._think(found)
            else:
                self._thought = self._thought or found in markers.ends

    def _may_grow(self, match: re.Match[str]) -> bool:
        """Whether the marker may be the beginning of a longer one, of which more comes."""
        if self.reader.done or match[0] not in self._markers.beginnings:
            return False
        rest = self.reader.text[match.start() :]
        return any(len(one) > len(rest) and one.startswith(rest) for one in self._markers.whole)

    def _counts(self, marker: str, start: int) -> bool:
        """Whether a marker is one at this place."""
        if marker in self._line_openers and marker in self._markers.calls:
            return self._at_line(start)
        nothing_said = not self._wrote and not self.reader.text[:start].strip()
        if marker in self._markers.begins:
            assert self._thinking is not None
            return self._thinking.anywhere or nothing_said
        if marker in self._markers.ends:
            # Where the prompt has ended the reasoning already, some models end it once more.
            return nothing_said and not self._thought
        return True

    def _call(self, opener: str, length: int) -> Generator[None, None, bool]:
        """Read calls after ``opener``; False when there are none, and it was text."""
        reader = self.reader
        assert self._grammar is not None
        assert self.calls is not None
        try:
            yield from self._grammar.read(reader, self.calls, opener)
        except Malformed:
            if reader.done and self.reason == "length":
                reader.text = ""  # a call that was cut off
                return True
            reader.give_back()
            self._say(min(length, len(reader.text)), False)
            return False
        reader.forget()
        return True

    def _at_line(self, start: int) -> bool:
        before = self.reader.text[:start].rstrip(" \t")
        return before.endswith("\n") if before else self._line_begins

    def _say(self, count: int, after_call: bool) -> None:
        """Read ``count`` characters of text."""
        if not count:
            return
        text = self.reader.take(count)
        self._line_begins = text.endswith("\n")
        text = self.reader.without_tokens(text)
        if not self._wrote and (self._thought or after_call):
            text = text.lstrip()
        if text:
            self._wrote = self._wrote or not text.isspace()
            self.content(text)
