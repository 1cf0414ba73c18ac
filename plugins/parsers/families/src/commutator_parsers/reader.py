"""The text of one answer as it arrives, read by generators that wait wherever more is needed.

A grammar is a generator: it reads what is there, and yields where it cannot go on without more
text. So what it finds does not depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

Steps = Generator[None, None, None]
"""A grammar that reads something, yielding where it waits for more text."""
Step = Callable[[str], None]
"""Takes a piece of what is read."""

_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^u\x00-\x1f]|\\u[0-9a-fA-F]{4})*')
_OUTSIDE = re.compile(r"[\s\w:,+\-.]*")
_WORD = re.compile(r"[\w+\-.]*")
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):  # noqa: N818 - what was read, not a failure of the program
    """What follows an opening marker is no call; it is given back as text."""


class _JsonScanner:
    """Finds the end of a JSON value that comes in pieces."""

    def __init__(self) -> None:
        self._brackets: list[str] = []
        """What closes those that are open."""
        self._in_string = False
        self.scalar = False
        """It is a number or a word."""
        self.ended = self.wrong = False
        self.control: str | None = None
        """A character, at the place that was returned, that a string may only have escaped."""

    def scan(self, text: str) -> int:
        """How much of ``text`` belongs to the value."""
        at, length = 0, len(text)
        self.control = None
        while at < length and not (self.ended or self.wrong):
            if not self._in_string:
                at = self._outside(text, at)
                continue
            at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]
            if at == length:
                break
            if text[at] == '"':
                self._in_string, at = False, at + 1
                self.ended = not self._brackets
                continue
            if text[at] == "\\":
                self.wrong = _HALF_ESCAPE.match(text, at) is None
            else:
                self.control = text[at]
            break
        return at

    def _outside(self, text: str, at: int) -> int:
        """Pass what begins at ``at``, outside of strings; returns where it ends."""
        brackets, character = self._brackets, text[at]
        if character == '"' and not self.scalar:
            self._in_string = True
            return at + 1
        if character in "{[" and not self.scalar:
            brackets.append(_CLOSING[character])
            return at + 1
        if brackets and character == brackets[-1]:
            brackets.pop()
            self.ended = not brackets
            return at + 1
        if not brackets:  # a number or a word, which ends with what follows
            end = _WORD.match(text, at).end()  # type: ignore[union-attr]
            self.wrong = end == at and not self.scalar
            self.ended = end < len(text)
            self.scalar = True
            return end
        end = _OUTSIDE.match(text, at).end()  # type: ignore[union-attr]
        self.wrong = end == at
        return end


class Reader:
    """The text that is not read yet.

    Where a marker is a special token of the vocabulary, only that token is the marker: the same
    characters, written by other tokens, are text. ``specials`` are those markers; empty where
    only text is known.
    """

    def __init__(self, specials: Collection[str] = ()) -> None:
        self.text = ""
        self.done = False
        """Nothing follows."""
        self.specials = specials
        self._position = 0
        """Characters read."""
        self._tokens: dict[int, int] = {}
        """Where special tokens begin, in characters from the answer's beginning: their length."""
        self._kept: list[str] | None = None

    def push(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> None:
        """Add ``text``; ``tokens`` are the special tokens in it, as (offset, length)."""
        if tokens:
            start = self._position + len(self.text)
            for offset, length in tokens:
                self._tokens[start + offset] = length
        self.text = self.text + text if self.text else text

    def skip(self, count: int) -> None:
        """Count characters that were passed on without being added."""
        self._position += count

    def take(self, count: int) -> str:
        """Read ``count`` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._position += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def without_tokens(self, text: str) -> str:
        """``text``, which was just taken, without the special tokens in it."""
        if not self._tokens:
            return text
        start = self._position - len(text)
        for at in sorted((at for at in self._tokens if start <= at < self._position), reverse=True):
            text = text[: at - start] + text[at - start + self._tokens.pop(at) :]
        return text

    # What was read may be given back.

    def keep(self) -> None:
        """Remember what is read from here on."""
        self._kept = []

    def forget(self) -> None:
        """What was read so far needs not be given back any more."""
        self._kept = None

    def give_back(self) -> None:
        """Unread everything since ``keep``."""
        text = "".join(self._kept or ())
        self._kept = None
        self._position -= len(text)
        self.text = text + self.text

    # Markers.

    def is_marker(self, literal: str, at: int) -> bool:
        """Whether ``literal``, which stands at ``at``, is meant as a marker there."""
        return literal not in self.specials or self._position + at in self._tokens

    def find(self, pattern: re.Pattern[str], start: int = 0) -> re.Match[str] | None:
        """The first marker that ``pattern`` matches."""
        match = pattern.search(self.text, start)
        while match is not None and not self.is_marker(match[0], match.start()):
            match = pattern.search(self.text, match.start() + 1)
        return match

    def unfinished(self, literals: Sequence[str], start: int = 0) -> int:
        """Where the end of the text begins that may still become one of ``literals``."""
        text = self.text
        length = len(text)
        if self.done:
            return length
        longest = max(map(len, literals), default=1) - 1
        for at in range(max(start, length - longest), length):
            end = text[at:]
            for literal in literals:
                if literal.startswith(end) and literal not in self.specials:
                    return at
        return length

    # Generators that read.

    def more(self) -> Steps:
        """Wait for more text. Raises Malformed when none follows."""
        if self.done:
            raise Malformed
        yield

    def space(self) -> Steps:
        """Read white space, until something else follows or the text ends."""
        while True:
            text = self.text
            rest = text.lstrip()
            if len(rest) < len(text):
                self.take(len(text) - len(rest))
            if rest or self.done:
                return
            yield

    def literal(self, *options: str, space: bool = True) -> Generator[None, None, str]:
        """Read the one of ``options`` that follows, after white space; "" when none does.

        Of those that begin alike, the longest comes first.
        """
        longest = max(map(len, options))
        while True:
            text = self.text
            start = len(text) - len(text.lstrip()) if space else 0
            rest = text[start : start + longest]
            if (
                not self.done
                and len(rest) < longest
                and any(len(option) > len(rest) and option.startswith(rest) for option in options)
            ):
                yield
                continue
            for option in options:
                if text.startswith(option, start) and self.is_marker(option, start):
                    self.take(start + len(option))
                    return option
            return ""

    def expect(self, *options: str, space: bool = True) -> Generator[None, None, str]:
        """As ``literal``, but raises Malformed when none of ``options`` follows."""
        found = yield from self.literal(*options, space=space)
        if not found:
            raise Malformed
        return found

    def until(
        self, pattern: re.Pattern[str], literals: Sequence[str], limit: int = 512
    ) -> Generator[None, None, tuple[str, str]]:
        """Read up to the first of ``literals``, which ``pattern`` finds: (text before, literal).

        Raises Malformed when none of them comes within ``limit`` characters.
        """
        while True:
            match = self.find(pattern)
            if match is not None:
                before = self.take(match.start())
                self.take(len(match[0]))
                return before, match[0]
            if self.unfinished(literals) > limit:
                raise Malformed
            yield from self.more()

    def json(self, sink: Step) -> Steps:
        """Read one JSON value after white space, and pass it on as it comes.

        Line ends and tabs within strings are escaped, which models forget. Only brackets and
        strings are looked at here. Raises Malformed at what JSON cannot hold.
        """
        yield from self.space()
        scanner = _JsonScanner()
        while True:
            if (at := scanner.scan(self.text)) or scanner.control is not None:
                piece = self.take(at)
                if scanner.control is not None:
                    piece += json_text(self.take(1))
                sink(piece)
            if scanner.control is not None:
                continue
            if scanner.wrong:
                raise Malformed
            if scanner.ended or (scanner.scalar and self.done):
                return
            yield from self.more()

    def json_value(self) -> Generator[None, None, object]:
        """Read one JSON value after white space. Raises Malformed when it is none."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return reads_json("".join(pieces))


def reads_json(text: str) -> object:
    """The value that is written there. Raises Malformed when it is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise Malformed from None


def _no_constant(name: str) -> object:
    raise ValueError(name)  # NaN and Infinity, which JSON does not know


def _object(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def json_text(text: str) -> str:
    """``text`` within a JSON string; pieces of a text give the pieces of it."""
    return json.encoder.encode_basestring(text)[1:-1]
