"""JSON schemas of tools, where they become parts of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from commutator.contract.conversation import Conversation, Tool
from commutator_parsers.calls import types_of

_NAMES_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}


def chosen_tools(conversation: Conversation) -> Sequence[Tool]:
    """The tools that the choice of tools leaves."""
    choice = conversation.tool_choice
    named = choice is not None and choice.mode == "named"
    return [
        tool
        for tool in conversation.tools
        if not named or (choice is not None and tool.name == choice.name)
    ]


def without_type(schema: Mapping[str, Any], types: Collection[str]) -> dict[str, Any]:
    """``schema`` for values of ``types`` alone."""
    found = {**schema, "type": sorted(types)}
    if isinstance(values := schema.get("enum"), Sequence):
        found["enum"] = [one for one in values if types_of({"const": one}, {}) & set(types)]
    return found


def moved(schema: Any, place: str) -> Any:
    """``schema`` with its references to its own root leading to ``place``."""
    if isinstance(schema, list | tuple):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place + value[1:]
        elif key in _NAMES_OF_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: moved(one, place) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else moved(value, place)
    return found
