"""Calls that the model has to make: what the answer must follow, in the family's own form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from commutator.contract.conversation import Conversation, Tool, ToolChoice
from commutator.contract.parser import ForcedCalls
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_parsers.grammars import EitherCalls, Grammar, JsonCalls

__all__ = [
    "forced_choice",
    "forced_grammar",
    "forced_opening",
    "in_prompt",
    "in_thoughts",
    "special_marks",
]

_NAMES_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}
_WHITESPACE = r"\n {0,24}| ?"
"""Between parts of JSON, where nobody else bounds it."""


def forced_choice(conversation: Conversation | None) -> ToolChoice | None:
    """The choice of tools, if it is one that forces calls."""
    choice = None if conversation is None else conversation.tool_choice
    return choice if choice is not None and choice.mode in {"required", "named"} else None


def forced_grammar(grammar: Grammar | None, template: str) -> JsonCalls | None:
    """The JSON that a model with this chat template writes as calls; None: it is no JSON alone."""
    if isinstance(grammar, EitherCalls):
        grammar = grammar.behind_names if "[ARGS]" in template else grammar.with_names
    return grammar if isinstance(grammar, JsonCalls) else None


def forced_opening(grammar: JsonCalls, template: str) -> str:
    """What the model writes before the JSON: the marker that its template has."""
    if grammar.line_openers:  # the JSON begins without one
        return ""
    known = (one for one in grammar.openers if one in template)
    return next(known, grammar.openers[0]) + grammar.after_opener


def in_prompt(grammar: JsonCalls, opening: str, conversation: Conversation) -> ForcedCalls:
    """Where the answer is the JSON of the calls, since the prompt ends with ``opening``."""
    value = json.dumps(_calls_schema(grammar, conversation))
    return ForcedCalls(opening=opening, constraint=Constraint(kind="json_schema", value=value))


def in_thoughts(
    grammar: JsonCalls, opening: str, conversation: Conversation, specials: Collection[str]
) -> ForcedCalls:
    """Where the answer begins with thoughts, and ``opening`` comes after them.

    Raises RequestError for markers that a grammar has no words for.
    """
    schema = _calls_schema(grammar, conversation)
    schema["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
    words = [f"%json {json.dumps(schema)}"]
    if opening:
        words = [*_words(opening, specials), *words]
    value = f"start: SPACE? {' '.join(words)}\nSPACE: /\\n{{1,2}}/"
    return ForcedCalls(opening="", constraint=Constraint(kind="grammar", value=value))


def _words(opening: str, specials: Collection[str]) -> Iterator[str]:
    """``opening`` in a grammar's words, where special tokens stand in angle brackets."""
    at = 0
    for start, length in special_marks(opening, specials):
        if start > at:
            yield json.dumps(opening[at:start], ensure_ascii=False)
        at = start + length
        marker = opening[start:at]
        if not re.fullmatch(r"<[^<>\s]+>", marker):
            raise RequestError(
                f"tool_choice: after thoughts this model cannot be made to write {marker}; "
                'use "auto", or have it not think',
                "tool_choice",
                "unsupported_parameter",
            )
        yield marker
    if opening[at:]:
        yield json.dumps(opening[at:], ensure_ascii=False)


def special_marks(text: str, specials: Collection[str]) -> Sequence[tuple[int, int]]:
    """The special tokens in ``text``, as (offset, length)."""
    known = [re.escape(one) for one in sorted(specials, key=len, reverse=True) if one in text]
    if not known:
        return ()
    return [(one.start(), len(one[0])) for one in re.finditer("|".join(known), text)]


def _calls_schema(grammar: JsonCalls, conversation: Conversation) -> dict[str, Any]:
    """The JSON schema of all that the answer may be. Raises RequestError."""
    choice = conversation.tool_choice
    assert choice is not None
    named = choice.mode == "named"
    tools = [tool for tool in conversation.tools if not named or tool.name == choice.name]
    schemas: dict[str, Any] = {}
    try:
        calls = [_call_schema(grammar, tool, schemas) for tool in tools]
    except RecursionError:
        raise RequestError("tools: parameters are nested too deeply", "tools") from None
    found: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if grammar.listed:
        found = {"type": "array", "items": found, "minItems": 1}
        if not choice.parallel:
            found["maxItems"] = 1
    return {**found, "$defs": schemas} if schemas else found


def _call_schema(grammar: JsonCalls, tool: Tool, schemas: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments_schema(tool, schemas)
    if grammar.keyed:
        properties = {tool.name: arguments}
    else:
        properties = {grammar.name_key: {"const": tool.name}, grammar.argument_key: arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool, schemas: dict[str, Any]) -> dict[str, Any]:
    """``schemas`` gets a tool's parameters with references, which are to be from the root."""
    given = {key: one for key, one in tool.parameters.items() if key not in {"$schema", "$id"}}
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "$ref" not in given:
        given["type"] = "object"
    place = f"tool{len(schemas)}"
    moved = _moved(given, f"#/$defs/{place}")
    if moved == given:
        return given
    schemas[place] = moved
    return {"$ref": f"#/$defs/{place}"}


def _moved(schema: Any, place: str) -> Any:
    """``schema`` with its references to its own root leading to ``place``."""
    if isinstance(schema, list | tuple):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place + value[1:]
        elif key in _NAMES_OF_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else _moved(value, place)
    return found
