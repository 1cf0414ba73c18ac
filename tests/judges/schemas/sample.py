"""Schemas of mixed kinds, always the same ones: parts of published schemas, and generated ones.

The published ones come with the package `check-jsonschema`: those of editors and build services.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

__all__ = ["sample"]

Schema = dict[str, Any]

_MOST_CHARACTERS = 8_000
_FILES = (
    *("azure-pipelines", "bamboo-spec", "bitbucket-pipelines", "buildkite", "circle-ci"),
    *("citation-file-format", "cloudbuild", "compose-spec", "dependabot", "drone-ci"),
    *("github-actions", "github-issue-forms", "github-workflows", "gitlab-ci", "meltano"),
    *("readthedocs", "renovate", "snapcraft", "taskfile", "travis", "woodpecker-ci"),
)


def sample(count: int) -> list[tuple[str, Schema]]:
    """(name, schema) of ``count``, published and generated ones in turns."""
    published, made = iter(_published()), _generated()
    found: list[tuple[str, Schema]] = []
    while len(found) < count:
        found += [next(published), next(made)]
    return found[:count]


def _published() -> list[tuple[str, Schema]]:
    """Definitions with all that they refer to, in an order that is random and always the same."""
    found = []
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    for name in _FILES:
        whole = json.loads((folder / f"{name}.json").read_text("utf-8"))
        for place in ("definitions", "$defs"):
            for key in whole.get(place, {}):
                schema = _with_what_it_needs(whole, place, key)
                if schema is not None and len(json.dumps(schema)) <= _MOST_CHARACTERS:
                    found.append((f"{name}: {key}", schema))
    return sorted(found, key=lambda one: sha256(one[0].encode()).digest())


def _with_what_it_needs(whole: Schema, place: str, key: str) -> Schema | None:
    """None where a reference leads somewhere else."""
    needed, open_ = dict[str, Any](), [key]
    while open_:
        name = open_.pop()
        if name not in needed:
            needed[name] = whole[place].get(name)
            for reference in _references(needed[name]):
                parts = reference.split("/")
                if parts[:2] != ["#", place] or len(parts) < 3 or parts[2] not in whole[place]:
                    return None
                open_.append(parts[2])
    schema = needed.pop(key)
    if not isinstance(schema, dict) or f"#/{place}/{key}" in _references([needed, schema]):
        return None
    return {**schema, place: needed} if needed else schema


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)


def _generated() -> Iterator[tuple[str, Schema]]:
    number = 0
    while True:
        for kind, make in _KINDS.items():
            if kind == "hard" and number % 2:
                continue
            yield f"{kind} {number}", make(random.Random(f"{kind} {number}"))
        number += 1


_NAMES = ("name", "id", "items", "ünits", "first name", "is_active", "$price", "tags", "a/b", "x")


def _scalar(chance: random.Random) -> Schema:
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randint(1, 30)},
            {"type": "string", "pattern": f"^[A-Z]{{{chance.randint(1, 3)}}}-[0-9]{{2,4}}$"},
            {"type": "string", "format": chance.choice(["date", "date-time", "uuid", "ipv4"])},
            {"type": "integer", "minimum": chance.randint(-50, 0), "maximum": 500},
            {"type": "number", "exclusiveMinimum": 0, "maximum": chance.randint(1, 99)},
            {"type": "integer", "multipleOf": chance.choice([2, 5, 25])},
            {"type": "boolean"},
            {"enum": chance.sample(["red", "green", 3, None, True, "né\n", -1.5], 3)},
            {"const": chance.choice(["v1", 7, False, None, {"a": [1]}])},
        ]
    )


def _value(chance: random.Random, depth: int) -> Schema:
    if depth and chance.random() < 0.5:
        return chance.choice([_object, _list, _union])(chance, depth - 1)
    return _scalar(chance)


def _object(chance: random.Random, depth: int = 2) -> Schema:
    names = chance.sample(_NAMES, chance.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _list(chance: random.Random, depth: int = 2) -> Schema:
    least = chance.randint(0, 2)
    items = _value(chance, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 3}


def _union(chance: random.Random, depth: int = 2) -> Schema:
    return {"anyOf": [_value(chance, depth), _value(chance, depth), {"type": "null"}]}


def _map(chance: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": "map"}},
        "required": ["kind"],
        "additionalProperties": _scalar(chance),
    }


def _tuple(chance: random.Random) -> Schema:
    parts = [_scalar(chance) for _ in range(3)]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": 3}


def _tree(chance: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _scalar(chance),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _tagged(chance: random.Random) -> Schema:
    shapes = [
        {**_object(chance, 0), "properties": {"type": {"const": name}, "v": _scalar(chance)}}
        for name in ("circle", "square")
    ]
    return {"oneOf": [{**one, "required": ["type", "v"]} for one in shapes]}


def _hard(chance: random.Random) -> Schema:
    """What few engines enforce: one of 24 generated schemas."""
    return chance.choice(
        [
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            {"type": "string", "not": {"enum": ["a"]}},
            {"type": "object", "minProperties": 1, "propertyNames": {"pattern": "^a"}},
        ]
    )


_KINDS: Mapping[str, Callable[[random.Random], Schema]] = {
    "object": _object,
    "flat": lambda chance: _object(chance, 0),
    "list": _list,
    "union": _union,
    "map": _map,
    "tuple": _tuple,
    "tree": _tree,
    "deep": lambda chance: _object(chance, 4),
    "tagged": _tagged,
    "scalar": _scalar,
    "choice": lambda chance: {"enum": chance.sample([*_NAMES, 1, 2, None], 6)},
    "hard": _hard,
}
