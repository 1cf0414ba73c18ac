"""Reads the JSON of requests, within bounds that are checked before it is decoded.

Decoding makes objects: the three bytes ``[],`` become a list of 56. So a text is refused by what is
counted in it, for a few nanoseconds a byte and without an object for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from commutator.errors import RequestError
from commutator.frontend.request.call import INLINE_BYTES, Call

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_VALUES",
    "WrongSomewhereError",
    "check_json",
    "parse_object",
    "read_object",
    "read_structured",
]

T = TypeVar("T")


class WrongSomewhereError(Exception):
    """A quick converter refused a body, and does not say why."""


async def read_structured(
    call: Call, quickly: Callable[[bytes], T], thoroughly: Callable[[bytes], T]
) -> T:
    """The body as ``quickly`` reads it, or else as ``thoroughly`` does, which names each mistake.

    Raises what they raise but for ``WrongSomewhereError`` of ``quickly``, and what ``Call.read``
    does.
    """
    async with call.room_for_body():
        body = await call.read()
        try:
            if len(body) <= INLINE_BYTES:
                return quickly(body)
            return await call.services.work.run(partial(quickly, body))
        except WrongSomewhereError:
            size = max(len(body), INLINE_BYTES + 1)  # finding every mistake takes much longer
            return await call.off_loop(size, partial(thoroughly, body))


async def read_object(call: Call) -> dict[str, Any]:
    """The body as an unchecked JSON object. Raises RequestError, and what ``Call.read`` does."""
    async with call.room_for_body():
        body = await call.read()
        return await call.off_loop(len(body), partial(parse_object, body))


def parse_object(body: bytes) -> dict[str, Any]:
    """``body`` as a JSON object. Raises RequestError."""
    try:
        check_json(body)
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return data


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
