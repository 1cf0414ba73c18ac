"""The calls of one answer: their ids, and the types that the tools' schemas give arguments."""

from __future__ import annotations

import ast
import json
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from commutator.contract.answer import AnswerEvent, CallArguments, CallEnd, CallStart
from commutator.contract.conversation import Conversation, ToolCall
from commutator_parsers.reader import Malformed, reads_json

IdStyle = Literal["call", "nine", "kimi"]
"""What ids look like: "call_" and 24 characters, 9 characters, or functions.NAME:INDEX."""

_LETTERS = string.ascii_letters + string.digits
_KIMI_ID = re.compile(r"functions\.[^:]+:\d+")
_JSON_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    type(None): ("null",),
    dict: ("object",),
    list: ("array",),
}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ANYTHING = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


class Calls:
    """Writes the events of calls, for the tools of one request."""

    def __init__(
        self, conversation: Conversation, style: IdStyle, events: list[AnswerEvent]
    ) -> None:
        """``events`` is where the events are added."""
        self.tools = {tool.name: tool for tool in conversation.tools}
        choice = conversation.tool_choice
        self._only_one = choice is not None and not choice.parallel
        self._style = style
        self._ids = {
            part.id
            for message in conversation.messages
            if not isinstance(message.content, str)
            for part in message.content
            if isinstance(part, ToolCall)
        }
        self._before = len(self._ids)
        self.events = events
        self._started = 0
        self.ended = 0
        """Calls that are complete."""

    def start(
        self,
        name: str,
        id: str | None = None,  # noqa: A002 - what it is called
        *,
        held: bool = False,
    ) -> Call:
        """Begin a call; ``held`` holds its events back. Raises Malformed for an unknown tool."""
        if name not in self.tools:
            raise Malformed
        number = self._started
        if self._only_one and self._started:
            return Call(self, number, name, [], counts=False)  # read, and left out
        self._started += 1
        chosen = self._id(name, id)
        self._ids.add(chosen)
        where = [] if held else self.events
        where.append(CallStart(number, chosen, name))
        return Call(self, number, name, where, counts=True)

    def _id(self, name: str, given: str | None) -> str:
        if self._style == "kimi":
            if given and _KIMI_ID.fullmatch(given) and given not in self._ids:
                return given
            return f"functions.{name}:{self._before + self._started - 1}"
        if self._style == "nine":
            if given and len(given) == 9 and given.isalnum() and given not in self._ids:  # noqa: PLR2004
                return given
            return "".join(random.choices(_LETTERS, k=9))  # noqa: S311 - names, not secrets
        return "call_" + "".join(random.choices(_LETTERS, k=24))  # noqa: S311 - as above


class Call:
    """One call, from its name to its end."""

    def __init__(
        self, calls: Calls, number: int, name: str, events: list[AnswerEvent], *, counts: bool
    ) -> None:
        self._counts = counts
        self._calls = calls
        self._number = number
        self._events = events
        self._pieces: list[str] = []
        self._keys: set[str] = set()
        self._schema = calls.tools[name].parameters

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON."""
        if not text:
            return
        self._pieces.append(text)
        last = self._events[-1] if self._events else None
        if type(last) is CallArguments:
            last.text += text  # within one delta
        else:
            self._events.append(CallArguments(self._number, text))

    def key(self, key: str) -> frozenset[str]:
        """Begin the argument ``key``; returns the types that its value may have.

        Raises Malformed for one that the call has already.
        """
        if key in self._keys:
            raise Malformed
        self.arguments(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False))
        self.arguments(": ")
        self._keys.add(key)
        return self.types(self.schema_of(key))

    def schema_of(self, key: str) -> object:
        """The schema of the argument ``key``; None where the tool states none."""
        return self.below(self._schema, key)

    def below(self, schema: object, key: str | None) -> object:
        """The schema of a property, or of a list's items for None."""
        if not isinstance(schema, Mapping):
            return None
        if key is None:
            return schema.get("items")
        properties = schema.get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def types(self, schema: object) -> frozenset[str]:
        """The types that a part of the tool's schema allows."""
        return types_of(schema, self._schema)

    def complete(self) -> None:
        """Complete the arguments. Raises Malformed when they are no JSON object."""
        if self._keys:
            self.arguments("}")
        elif not self._pieces:
            self.arguments("{}")
        if not isinstance(reads_json("".join(self._pieces)), dict):
            raise Malformed

    def end(self) -> None:
        """The call is complete. Raises Malformed when its arguments are no JSON object."""
        self.complete()
        self.tell_end()

    def tell_end(self) -> None:
        """End a call whose arguments are complete, and tell what was held back of it."""
        if self._counts:
            events = self._calls.events
            if self._events is not events:
                events += self._events
            self._calls.ended += 1
            events.append(CallEnd(self._number))


def types_of(schema: object, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that ``schema``, a part of ``root``, allows; all where it does not say."""
    found = frozenset(_types_of(schema, root, depth)) & _ANYTHING
    return found or _ANYTHING


def _types_of(schema: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types_of(target, root, depth - 1)
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, Sequence):
        yield from stated
    if schema.get("nullable") is True:
        yield "null"
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name) or ():
            yield from _types_of(one, root, depth - 1)
    if stated is None:
        yield from _implied_types(schema)


def _implied_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """By what else a schema says than its type."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if _is_list(values) else ():
        yield from _JSON_TYPES.get(type(value), ())
    if "properties" in schema:
        yield "object"
    if "items" in schema:
        yield "array"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument that the model wrote as plain ``text``.

    What fits none of the other ``types`` is a string.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    if found := _WORDS.get(bare.lower()):
        kind = "null" if found == "null" else "boolean"
        if kind in types and (bare == found or types != _ANYTHING):
            return found
    elif _NUMBER.fullmatch(bare):
        if "number" in types or ("integer" in types and float(bare).is_integer()):
            return bare
    elif bare[:1] in {"{", "[", '"'}:
        try:
            value = reads_json(bare)
        except Malformed:
            value = _literal(bare)
        kinds = _JSON_TYPES.get(type(value), ())
        if not types.isdisjoint(kinds) and kinds != ("string",):
            return json.dumps(value, ensure_ascii=False)
        if kinds == ("string",) and "string" not in types:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> object:
    """A list or dictionary in Python's words; None when it is neither."""
    try:
        value = ast.literal_eval(text)
        reads_json(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, Malformed):
        return None
    return value if isinstance(value, dict | list) else None
