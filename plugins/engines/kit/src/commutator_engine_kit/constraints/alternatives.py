"""Whether a value can match two JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_DEPTH = 6


def are_apart(schemas: Sequence[Any], root: Any) -> bool:
    """Whether no value matches two of ``schemas``; False also where that is not known."""
    return all(differ(one, other, root) for one, other in combinations(schemas, 2))


def differ(one: Any, other: Any, root: Any) -> bool:
    """Whether no value matches both; False also where that is not known.

    ``root`` is the document that their references are in.
    """
    one, other = resolved(one, root), resolved(other, root)
    shared = _types(one, root) & _types(other, root)
    if not shared:
        return True
    if (values := _values(one)) is not None and (others := _values(other)) is not None:
        return not values & others
    if shared != {"object"}:
        return False
    here, there = _fixed(one, root), _fixed(other, root)
    return any(not here[key] & there[key] for key in here.keys() & there.keys())


def _fixed(schema: Any, root: Any) -> Mapping[str, frozenset[str]]:
    """The values that required keys can have, for keys that have some only."""
    if not isinstance(schema, dict):
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = ((key, _values(resolved(properties.get(key), root))) for key in required)
    return {key: values for key, values in found if values is not None}


def _values(schema: Any) -> frozenset[str] | None:
    if not isinstance(schema, dict):
        return None
    some = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(some, list):
        return None
    return frozenset(json.dumps(_number(one), sort_keys=True) for one in some)


def _number(value: Any) -> Any:
    """1.0 as 1, which JSON schemas take for the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def resolved(schema: Any, root: Any) -> Any:
    """What ``schema`` refers to, if it is a reference, without what stands beside that."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _types(schema: Any, root: Any, depth: int = _DEPTH) -> frozenset[str]:
    """The types of values that it may match; all where it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not depth:
        return _TYPES
    return frozenset.intersection(_TYPES, *_limits(schema, root, depth))


def _limits(schema: Mapping[str, Any], root: Any, depth: int) -> Iterator[frozenset[str]]:
    stated = schema.get("type")
    if isinstance(stated, str | list):
        names = [stated] if isinstance(stated, str) else stated
        yield frozenset("number" if one == "integer" else one for one in names)
    if (values := _values(schema)) is not None:
        yield frozenset(_type_of(json.loads(one)) for one in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(name), list):
            yield frozenset[str]().union(*(_types(one, root, depth - 1) for one in some))
    if isinstance(some := schema.get("allOf"), list):
        yield from (_types(one, root, depth - 1) for one in some)


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")
