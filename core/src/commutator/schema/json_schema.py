"""JSON Schema (2020-12) of the classes that ``structure`` accepts."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs

from commutator.contract.settings import Bounds, ByteSize

__all__ = [
    "json_schema",
]

_SIMPLE = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}

Special = Callable[[Any], dict[str, Any] | None]


def json_schema(kind: Any, special: Special | None = None) -> dict[str, Any]:
    """The schema of an annotation or attrs class.

    ``special`` may answer first for classes that need a schema of their own (plugin unions);
    None lets the general rule decide.
    """
    if special is not None and (found := special(kind)) is not None:
        return found
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if (size := next((e for e in args[1:] if isinstance(e, ByteSize)), None)) is not None:
            whole = {"type": "integer", "minimum": size.minimum}
            return {"anyOf": [whole, {"type": "string", "pattern": size.pattern}]}
        return json_schema(args[0], special) | _limits(args[1:])
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_schema(arg, special) for arg in args]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if origin in (list, tuple) or kind in (list, tuple):
        return {"type": "array", "items": json_schema(args[0], special) if args else {}}
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        values = json_schema(args[1], special) if args else {}
        return {"type": "object", "additionalProperties": values}
    if attrs.has(kind):
        return _class_schema(kind, special)
    return dict(_SIMPLE.get(kind, {}))


def _limits(extras: tuple[Any, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for bounds in (extra for extra in extras if isinstance(extra, Bounds)):
        pairs = (
            ("minimum", bounds.minimum),
            ("maximum", bounds.maximum),
            ("exclusiveMinimum", bounds.above),
        )
        limits |= {name: value for name, value in pairs if value is not None}
    return limits


def _class_schema(cls: Any, special: Special | None) -> dict[str, Any]:
    attrs.resolve_types(cls, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for attribute in attrs.fields(cls):
        schema = json_schema(attribute.type, special)
        if doc := attribute.metadata.get("doc"):
            schema["description"] = doc
        if attribute.default is attrs.NOTHING:
            required.append(attribute.name)
        elif isinstance(attribute.default, str | int | float | bool):
            schema["default"] = attribute.default
        properties[attribute.name] = schema
    result: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return result | ({"required": required} if required else {})
