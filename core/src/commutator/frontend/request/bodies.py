"""Reads the JSON of requests, within bounds that are checked before it is decoded.

Decoding makes objects: the three bytes ``[],`` become a list of 56. So a text is refused by what is
counted in it, for a few nanoseconds a byte and without an object for each value.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from commutator.errors import RequestError
from commutator.frontend.request.call import Call


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

MAX_KEYS = 2_048
"""Of one object: each becomes a string and an entry, also where nobody looks for it."""

_ALL = bytes(range(256))
_NEITHER_QUOTE_NOR_MARK = bytes(set(_ALL) - set(b'"[]{},:'))
_STEPS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}
_BRACKET_OR_COLONS = re.compile(rb"[][{}]|:+")


def check_json(text: bytes) -> None:
    """Raise RequestError if ``text`` has too many values or keys, or is nested too deeply.

    What is counted is exact up to the first mistake in the text, where decoding ends.
    """
    opened = text.count(b"[") + text.count(b"{")
    few = opened <= MAX_DEPTH and text.count(b":") <= MAX_KEYS
    if few and opened + text.count(b",") <= MAX_VALUES:
        return  # even if each of them stands outside of strings
    marks = _outside_strings(text)
    containers = marks.count(b"[") + marks.count(b"{")
    if containers > MAX_CONTAINERS:
        _refuse(f"at most {MAX_CONTAINERS} objects and lists", containers)
    values = containers + marks.count(b",")
    if values > MAX_VALUES:
        _refuse(f"at most {MAX_VALUES} values", values)
    depth = max(accumulate(map(_STEPS.__getitem__, marks.translate(None, b",:"))), default=0)
    if depth > MAX_DEPTH:
        _refuse(f"at most {MAX_DEPTH} objects and lists inside one another", depth)
    keys = marks.count(b":")  # mostly there are not even as many in all objects together
    if keys > MAX_KEYS and (keys := _most_keys(marks.translate(None, b","))) > MAX_KEYS:
        _refuse(f"at most {MAX_KEYS} keys in one object", keys)


def _most_keys(marks: bytes) -> int:
    """The most colons directly in a pair of brackets."""
    most, keys = 0, list[int]()
    for mark in _BRACKET_OR_COLONS.findall(marks):
        if mark in b"[{":
            keys.append(0)
        elif not keys:
            break  # a mistake
        elif mark in b"]}":
            keys.pop()
        else:
            keys[-1] += len(mark)
            most = max(most, keys[-1])
    return most


def _outside_strings(text: bytes) -> bytes:
    """The brackets, commas and colons of ``text`` that are not part of a string."""
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
