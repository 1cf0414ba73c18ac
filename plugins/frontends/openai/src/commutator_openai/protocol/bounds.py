"""Bounds of a JSON text, checked before it is decoded.

Decoding makes objects: the three bytes ``[],`` become a list of 56. So a text is refused by what is
counted in it, for a few nanoseconds a byte and without an object for each value.
"""

from __future__ import annotations

from itertools import accumulate

from commutator.errors import RequestError

__all__ = ["MAX_CONTAINERS", "MAX_DEPTH", "MAX_VALUES", "check_json"]

MAX_DEPTH = 64
"""Objects and lists inside one another."""
MAX_CONTAINERS = 50_000
"""Objects and lists: a conversation of thousands of messages has some ten thousand."""
MAX_VALUES = 1 << 20
"""Values of lists and objects: as many token ids as the longest prompt has."""

_ALL = bytes(range(256))
_NEITHER_QUOTE_NOR_MARK = bytes(set(_ALL) - set(b'"[]{},'))
_BRACKETS = bytes.maketrans(b"[{]}", b"++--")


def check_json(text: bytes) -> None:
    """Raise RequestError if ``text`` has too many values, or is nested too deeply.

    What is counted is exact up to the first mistake in the text, where decoding ends.
    """
    opened = text.count(b"[") + text.count(b"{")
    if opened <= MAX_DEPTH and opened + text.count(b",") <= MAX_VALUES:
        return  # even if each of them stands outside of strings
    marks = _outside_strings(text)
    brackets = marks.translate(None, b",")
    containers = brackets.count(b"[") + brackets.count(b"{")
    if containers > MAX_CONTAINERS:
        _refuse(f"at most {MAX_CONTAINERS} objects and lists", containers)
    values = containers + marks.count(b",")
    if values > MAX_VALUES:
        _refuse(f"at most {MAX_VALUES} values", values)
    steps = (1 if mark == ord("+") else -1 for mark in brackets.translate(_BRACKETS))
    depth = max(accumulate(steps), default=0)
    if depth > MAX_DEPTH:
        _refuse(f"at most {MAX_DEPTH} objects and lists inside one another", depth)


def _outside_strings(text: bytes) -> bytes:
    """The brackets and commas of ``text`` that are not part of a string."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(None, _NEITHER_QUOTE_NOR_MARK)
    quotes = marks.count(b'"')
    if quotes > 4 * MAX_VALUES:  # two for each value, and two for its key
        _refuse(f"at most {MAX_VALUES} values", quotes // 4)
    return b"".join(marks.split(b'"')[::2])


def _refuse(expected: str, got: int) -> None:
    raise RequestError(
        f"the body is too complex: expected {expected}, got {got}", code="too_complex"
    )
