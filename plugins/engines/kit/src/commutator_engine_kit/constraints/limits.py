"""What libraries other than llguidance ignore in JSON schemas, xgrammar above all.

They take a schema for what its first matching form says: beside `$ref`, `anyOf` or `enum`, or
without a `type`, other keywords have no effect. Such a schema is refused here instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_engine_kit.constraints.alternatives import are_apart

_NOTES = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "$schema", "$anchor", "$defs", "definitions", "nullable", "strict"),
        *("contentEncoding", "contentMediaType", "x-guidance"),
    }
)
"""Keywords that no value has to follow."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    "integer": frozenset(_BOUNDS),
    "number": frozenset(_BOUNDS),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
            *("patternProperties", "propertyNames"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""The keywords that are enforced, each for values of its type."""
_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Beside one of these, nothing else is enforced."""
_ALL = frozenset({"type"}).union(*_OF_TYPE.values(), _ALONE) | {
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems"),
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}
"""The keywords that values have to follow."""


def check_enforced(constraint: Constraint, engine: str) -> None:
    """Raise RequestError for a schema of which ``engine`` would ignore a keyword, naming it."""
    for schema in _schemas_of(constraint):
        keyword = next(_ignored(schema, schema), None)
        if keyword is not None:
            raise RequestError(
                f"response_format: {constraint.kind}: {engine} would ignore {keyword}; say it "
                "otherwise, or let the server enforce schemas with llguidance",
                "response_format",
                "invalid_value",
            )


def _schemas_of(constraint: Constraint) -> list[Any]:
    if constraint.kind == "json_schema":
        return [json.loads(str(constraint.value))]
    if constraint.kind != "structural_tag":
        return []
    found: list[Any] = []
    open_ = [json.loads(str(constraint.value))]
    while open_:
        match open_.pop():
            case {"schema": dict() as schema}:
                found.append(schema)
            case {"json_schema": dict() as schema}:
                found.append(schema)
            case dict() as others:
                open_ += others.values()
            case list() as others:
                open_ += others
    return found


def _ignored(schema: Any, root: Any) -> Iterator[str]:
    """The keywords that would be ignored, in ``schema`` or below, each with what is beside it."""
    if not isinstance(schema, Mapping):
        return
    own = [key for key in schema if key in _ALL]
    for name in ("$defs", "definitions"):
        yield from _in_each(schema.get(name), root)
    alone = next((key for key in _ALONE if key in own), None)
    if alone is not None:
        yield from _beside(schema, alone, own, root)
    elif own:
        yield from _of_types(schema, own)
    for key in ("properties", "patternProperties"):
        yield from _in_each(schema.get(key), root)
    for key in ("items", "additionalProperties", "propertyNames"):
        yield from _ignored(schema.get(key), root)
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for one in schema.get(key) or ():
            yield from _ignored(one, root)


def _in_each(schemas: Any, root: Any) -> Iterator[str]:
    for one in schemas.values() if isinstance(schemas, Mapping) else ():
        yield from _ignored(one, root)


def _beside(
    schema: Mapping[str, Any], alone: str, own: Collection[str], root: Any
) -> Iterator[str]:
    types = _types(schema)
    values = schema["enum"] if alone == "enum" else [schema.get("const")]
    told = alone in ("enum", "const") and isinstance(values, list)
    for key in own:
        says_nothing_more = key == "type" and told and all(_is_of(one, types) for one in values)
        if key != alone and not says_nothing_more:
            yield f"{key} beside {alone}"
    if alone == "oneOf" and not are_apart(schema["oneOf"], root):
        yield "that only one of oneOf may match"
    if alone == "allOf" and len(schema["allOf"]) != 1:
        yield "all but one schema of allOf"


def _of_types(schema: Mapping[str, Any], own: Collection[str]) -> Iterator[str]:
    types = _types(schema)
    if not types:
        # These alone are read as objects and arrays.
        types = [
            *(["object"] if "properties" in own else []),
            *(["array"] if "items" in own or "prefixItems" in own else []),
        ]
    known = frozenset().union(*(_OF_TYPE.get(one, frozenset()) for one in types))
    for key in own:
        if key != "type" and key not in known and _matters(key, types):
            yield key if "type" in schema else f"{key} without a type"
    lengths = [key for key in ("minLength", "maxLength") if key in own]
    texts = [key for key in ("pattern", "format") if key in own]
    if "string" in types and texts and (lengths or len(texts) > 1):
        yield f"{[*lengths, *texts][0]} beside {texts[0] if lengths else texts[1]}"
    if "string" in types and "format" in own and schema["format"] not in _FORMATS:
        yield f"format {schema['format']}"
    if "object" in types:
        yield from _of_object(schema, own)


def _of_object(schema: Mapping[str, Any], own: Collection[str]) -> Iterator[str]:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in properties:
            yield f"required of {name!r}, which is not in properties"
            return
    for key in ("patternProperties", "propertyNames"):
        others = [one for one in own if one not in (key, "type", "additionalProperties")]
        if key in own and others:
            yield f"{key} beside {others[0]}"
    if len(schema.get("patternProperties") or ()) > 1:
        yield "all but one of patternProperties"


def _matters(key: str, types: Collection[str]) -> bool:
    """Whether values of ``types`` have to follow it; none: they may be of any."""
    of = [name for name, keys in _OF_TYPE.items() if key in keys]
    return not types or not of or any(one in types for one in of)


def _types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else [*kind]


def _is_of(value: Any, types: Collection[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return not {"integer", "number"}.isdisjoint(types)
        case float():
            return "number" in types
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types
