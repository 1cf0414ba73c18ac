"""Whether a scripted text follows a constraint, as far as this engine knows its keywords. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from commutator.contract.request import Constraint
from commutator_sim.schemas import JOINED, NOTES, OF_TYPE, json_types, referred, within

_MOST = 10_000
"""Comparisons for one text: schemas may refer to themselves."""
_DEEPEST = 100


def follows(constraint: Constraint, text: str) -> bool:
    """Whether ``text`` is a whole answer; False also where a keyword is not known here."""
    if constraint.kind == "choice":
        return text in constraint.value
    if constraint.whitespace is not None:
        return False
    try:
        if constraint.kind == "structural_tag":
            return _follows_tags(json.loads(str(constraint.value)), text)
        value = json.loads(text)
        if constraint.kind == "json_object":
            return isinstance(value, dict)
        schema = json.loads(str(constraint.value))
        return _Judge(schema).fits(schema, value, 0)
    except (TypeError, AttributeError, ValueError, KeyError):  # no JSON, or no JSON schema
        return False


def _follows_tags(tags: Mapping[str, Any], text: str) -> bool:
    """Whether what follows each trigger in ``text`` is one of the structures."""
    if "format" in tags:
        return any(_end_of(one, text, 0) == len(text) for one in alternatives(tags))
    at = 0
    while True:
        found = [place for one in tags["triggers"] if (place := text.find(one, at)) >= 0]
        if not found:
            return True
        ends = [_end_of(one, text, min(found)) for one in tags["structures"]]
        at = max((one for one in ends if one is not None), default=-1)
        if at < 0:
            return False


def alternatives(tags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The structures of which the whole answer is one, JSON alone with nothing around it.

    Raises ValueError, TypeError or KeyError for any other format.
    """
    if tags["format"]["type"] != "or":
        raise ValueError(tags["format"]["type"])
    found = []
    for one in tags["format"]["elements"]:
        content = one["content"] if one["type"] == "tag" else one
        if content["type"] != "json_schema":
            raise ValueError(content["type"])
        around = (one["begin"], one["end"]) if one["type"] == "tag" else ("", "")
        found.append({"begin": around[0], "schema": content["json_schema"], "end": around[1]})
    return found


def _end_of(structure: Mapping[str, Any], text: str, at: int) -> int | None:
    """Where ``structure`` ends that begins at ``at``; None: it is not there."""
    begin, schema, end = structure["begin"], structure.get("schema", {}), structure["end"]
    if not text.startswith(begin, at):
        return None
    try:
        value, at = json.JSONDecoder().raw_decode(text, at + len(begin))
    except ValueError:
        return None
    follows_end = text.startswith(end, at)
    return at + len(end) if follows_end and _Judge(schema).fits(schema, value, 0) else None


class _Judge:
    """Compares values with one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST

    def fits(self, schema: Any, value: Any, depth: int) -> bool:
        """Whether ``value`` is valid; False once it takes too long to tell."""
        self._left -= 1
        if depth > _DEEPEST:
            self._left = -1
        if self._left < 0:
            return False
        return schema if isinstance(schema, bool) else self._fits(schema, value, depth)

    def _fits(self, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        kinds = json_types(value)
        own = {key: one for key, one in schema.items() if key not in NOTES}
        wanted = own.pop("type", None)
        if wanted is not None and not kinds & {*([wanted] if isinstance(wanted, str) else wanted)}:
            return False
        for key in [key for key in JOINED if key in own]:
            if not self._joins(key, own.pop(key), value, depth + 1):
                return False
        if own.keys() - set().union(*OF_TYPE.values()):
            return False
        if "object" in kinds:
            return self._object(own, value, depth + 1)
        if "array" in kinds:
            return self._array(own, value, depth + 1)
        if "string" in kinds:
            return bool(own.get("minLength", 0) <= len(value) <= own.get("maxLength", len(value)))
        return "number" not in kinds or within(own, value)

    def _joins(self, key: str, given: Any, value: Any, depth: int) -> bool:
        match key:
            case "$ref":
                return self.fits(referred(self._root, given), value, depth)
            case "const":
                return _written(given) == _written(value)
            case "enum":
                return _written(value) in map(_written, given)
        fitting = [self.fits(one, value, depth) for one in given]
        if key == "oneOf":
            return fitting.count(True) == 1 and self._left >= 0
        return any(fitting) if key == "anyOf" else all(fitting)

    def _object(self, own: Mapping[str, Any], value: Mapping[str, Any], depth: int) -> bool:
        properties, more = own.get("properties", {}), own.get("additionalProperties", True)
        return all(name in value for name in own.get("required", ())) and all(
            self.fits(properties.get(name, more), one, depth) for name, one in value.items()
        )

    def _array(self, own: Mapping[str, Any], value: list[Any], depth: int) -> bool:
        first, rest = own.get("prefixItems", []), own.get("items", True)
        if not own.get("minItems", 0) <= len(value) <= own.get("maxItems", len(value)):
            return False
        schemas = [*first, *(rest for _ in value[len(first) :])]
        return all(
            self.fits(schema, one, depth) for schema, one in zip(schemas, value, strict=False)
        )


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
