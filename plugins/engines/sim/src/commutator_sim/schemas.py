"""The keywords of JSON schemas that this engine follows, and what a reference means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTES = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly"),
}
"""They demand nothing."""
OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
"""What says something of values of a type only."""
JOINED = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""What says something of values of any type."""


def referred(root: Any, reference: Any) -> Any:
    """What ``reference`` leads to in the document. Raises ValueError for what is not there."""
    found = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ValueError(f"the $ref {reference!r:.60}")
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"the $ref {reference!r:.60}")
        found = found[name]
    return found


def json_types(value: object) -> set[str]:
    """The names of the types that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def within(own: Mapping[str, Any], value: float) -> bool:
    """Whether a number is within the bounds of a schema."""
    return bool(
        own.get("minimum", value) <= value <= own.get("maximum", value)
        and ("exclusiveMinimum" not in own or value > own["exclusiveMinimum"])
        and ("exclusiveMaximum" not in own or value < own["exclusiveMaximum"])
    )
