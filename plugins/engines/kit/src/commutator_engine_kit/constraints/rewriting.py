"""JSON schemas in the keywords that llguidance enforces, where others can be said by them.

What is written means the same. What cannot be said otherwise is left, and refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from commutator_engine_kit.constraints.alternatives import are_apart, differ, resolved
from commutator_engine_kit.constraints.structural_tags import escaped

_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_DATA = frozenset({"const", "enum", "default", "examples"})
_NOTES = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "$schema", "$anchor", "$defs", "definitions"),
    }
)
"""Keywords that no value has to follow."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST_ARRAYS = 512
"""That are written out in place of ``uniqueItems``."""
_MOST_PARTS = 8
"""Of a schema that is written once more for each of them."""
_MOST_OVERLAPPING = 4
"""Schemas of a ``oneOf`` that are not apart."""
_MOST_CHARACTERS = 400
"""Of texts that are excluded."""
_DEEPEST_PATTERN = 64
_DEPTH = 8

_Schema = dict[str, Any]


def rewritten(schema: Any) -> Any:
    """``schema`` without the keywords that others can say as well."""
    return _Writer(schema).write(schema)


class _Writer:
    """Rewrites the schemas of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: Sequence[Callable[[_Schema], Any]] = (
            *(self._unique_items, self._property_names, self._dependencies),
            *(self._conditions, self._not, self._one_of),
        )

    def write(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found: Any = {key: self._written(key, value) for key, value in schema.items()}
        for rule in self._rules:
            if isinstance(found, dict):
                found = rule(found)
        return found

    def _written(self, key: str, value: Any) -> Any:
        if key in _DATA:
            return value
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            return {name: self.write(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self.write(one) for one in value]
        return self.write(value)

    # ----------------------------------------------------------------- keywords

    def _unique_items(self, schema: _Schema) -> Any:
        if schema.get("uniqueItems") is False:
            return _without(schema, "uniqueItems")
        if schema.get("uniqueItems") is not True:
            return schema
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if not _are_numbers(least, most) or not isinstance(first, list):
            return schema
        if most <= 1 or (rest is False and are_apart(first, self._root)):
            return _without(schema, "uniqueItems")
        if schema.get("type") != "array" or schema.keys() - _NOTES - {
            *("type", "items", "minItems", "maxItems", "uniqueItems"),
        }:
            return schema
        values = self._values(rest, _DEPTH)
        if values is None:
            return schema
        lengths = range(int(least), min(len(values), int(min(most, len(values)))) + 1)
        if sum(math.perm(len(values), length) for length in lengths) > _MOST_ARRAYS:
            return schema
        arrays = [list(one) for length in lengths for one in permutations(values, length)]
        notes = {key: value for key, value in schema.items() if key in _NOTES}
        return {**notes, "enum": arrays} if arrays else False

    def _values(self, schema: Any, depth: int) -> list[Any] | None:
        """All values that follow ``schema``, each once; None: too many, or not known."""
        own = self._own(schema)
        if not own or not depth:
            return None
        kind = own.pop("type", None)
        if not own:
            return [False, True] if kind == "boolean" else [None] if kind == "null" else None
        if len(own) > 1:
            return None
        ((key, given),) = own.items()
        if key == "const":
            given = [given]
        elif key in ("anyOf", "oneOf") and isinstance(given, list) and kind is None:
            parts = [self._values(one, depth - 1) for one in given]
            given = [value for part in parts for value in part or ()]
            if None in parts or (key == "oneOf" and len(given) != len(_distinct(given))):
                return None
        elif key != "enum" or not isinstance(given, list):
            return None
        names = [kind] if isinstance(kind, str) else kind
        return [one for one in _distinct(given) if names is None or _type_names(one) & {*names}]

    def _property_names(self, schema: _Schema) -> Any:
        if "propertyNames" not in schema:
            return schema
        names, others = schema["propertyNames"], _without(schema, "propertyNames")
        if names is False:
            return _and(others, {"maxProperties": 0})
        own = {} if names is True else self._own(names)
        if own is None or own.pop("type", "string") != "string":
            return schema
        found = _named(others, own) if own else others
        return schema if found is None else found

    def _dependencies(self, schema: _Schema) -> Any:
        """What is required, or must fit, where a key is there."""
        found = schema
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            given = found.get(keyword)
            if not isinstance(given, dict) or len(given) > _MOST_PARTS:
                continue
            parts = [
                {"anyOf": [{"properties": {key: False}}, _needed(needs)]}
                for key, needs in given.items()
            ]
            found = _and(_without(found, keyword), *parts)
        return found

    def _conditions(self, schema: _Schema) -> Any:
        if "if" not in schema:
            return _without(schema, "then", "else")  # alone, they mean nothing
        fits = schema["if"]
        others = _without(schema, "if", "then", "else")
        fails = self._negated(fits, _DEPTH)
        if fails is None:
            return schema
        then = _all_of(fits, schema.get("then", True))
        otherwise = _all_of(fails, schema.get("else", True))
        return _and(others, {"anyOf": [then, otherwise]})

    def _not(self, schema: _Schema) -> Any:
        if "not" not in schema:
            return schema
        negated = self._negated(schema["not"], _DEPTH)
        if negated is None:
            return schema
        others = _without(schema, "not")
        return negated if negated is False else _and(others, negated)

    def _one_of(self, schema: _Schema) -> Any:
        """``anyOf``, where each of its schemas excludes the others or can be made to."""
        some = schema.get("oneOf")
        if not isinstance(some, list):
            return schema
        others = _without(schema, "oneOf")
        if are_apart(some, self._root):
            return (
                {**others, "anyOf": some} if "anyOf" not in schema else _and(others, _any_of(some))
            )
        if len(some) > _MOST_OVERLAPPING:
            return schema
        negated = [self._negated(one, _DEPTH) for one in some]
        alone = []
        for number, one in enumerate(some):
            excluded = [
                negated[place]
                for place, other in enumerate(some)
                if place != number and not differ(one, other, self._root)
            ]
            if None in excluded:
                return schema
            alone.append(_all_of(one, *excluded))
        return _and(others, _any_of(alone))

    # ----------------------------------------------------------------- negation

    def _own(self, schema: Any) -> _Schema | None:
        """The keywords of an object schema that count; None: not known what they are."""
        for _ in range(_DEPTH):
            if not isinstance(schema, dict):
                return None
            own = {key: value for key, value in schema.items() if key not in _NOTES}
            if "$ref" not in own:
                return own
            if len(own) > 1:  # older drafts ignore what stands beside it
                return None
            schema = resolved(own, self._root)
        return None

    def _negated(self, schema: Any, depth: int) -> Any:
        """What all values follow that do not follow ``schema``; None: there are no words for it."""
        if isinstance(schema, bool):
            return not schema
        own = self._own(schema)
        if own is None or not depth:
            return None
        parts = [self._negated_keyword(key, value, depth) for key, value in own.items()]
        if None in parts or len(parts) > _MOST_PARTS:
            return None
        return _any_of(parts)

    def _negated_keyword(self, key: str, value: Any, depth: int) -> Any:
        match key:
            case "type":
                return _not_of_types([value] if isinstance(value, str) else value)
            case "const":
                return _not_among([value])
            case "enum" if isinstance(value, list):
                return _not_among(value)
            case "not":
                return value
            case "required" if _are_names(value):
                missing = [{"properties": {name: False}} for name in value]
                return False if not missing else {"type": "object", **_any_of(missing)}
            case "properties" if isinstance(value, dict):
                parts = [(name, self._negated(one, depth - 1)) for name, one in value.items()]
                if any(one is None for _, one in parts):
                    return None
                return _any_of(
                    {"type": "object", "properties": {name: one}, "required": [name]}
                    for name, one in parts
                    if one is not False
                )
            case "anyOf" | "allOf" if isinstance(value, list):
                parts_of = [self._negated(one, depth - 1) for one in value]
                if None in parts_of or len(parts_of) > _MOST_PARTS:
                    return None
                return _any_of(parts_of) if key == "allOf" else _all_of(*parts_of)
        return _beyond(key, value)


# ------------------------------------------------------------------------- parts of schemas


def _without(schema: Mapping[str, Any], *keys: str) -> _Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _and(schema: _Schema, *others: Any) -> _Schema:
    more = [one for one in others if one is not True]
    if not more:
        return schema
    given = schema.get("allOf", [])
    return {**schema, "allOf": [*given, *more]} if isinstance(given, list) else schema


def _all_of(*schemas: Any) -> Any:
    some = [one for one in schemas if one is not True]
    if False in some:
        return False
    return {"allOf": some} if len(some) > 1 else some[0] if some else True


def _any_of(schemas: Iterable[Any]) -> Any:
    some = [one for one in schemas if one is not False]
    if True in some:
        return True
    return {"anyOf": some} if len(some) > 1 else some[0] if some else False


def _named(schema: _Schema, own: Mapping[str, Any]) -> _Schema | None:
    """``schema`` for objects whose keys follow the keywords ``own``; None: it has no such form."""
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    if schema.get("patternProperties") or not isinstance(properties, dict):
        return None
    if isinstance(some := own.get("enum"), list) and len(own) == 1:
        listed = {name: properties.get(name, rest) for name in some if isinstance(name, str)}
        hidden = {name: False for name in properties if name not in listed}
        return {**schema, "properties": {**listed, **hidden}, "additionalProperties": False}
    pattern = _pattern_of(own)
    if pattern is None:
        return None
    fits = {name for name in properties if re.search(pattern, name)}
    kept = {name: one if name in fits else False for name, one in properties.items()}
    if rest is False:
        return {**schema, "properties": kept}
    if fits and rest is not True and rest != {}:
        return None  # the pattern would be of these properties, too
    patterns = {"properties": kept, "patternProperties": {pattern: rest}}
    return {**schema, **patterns, "additionalProperties": False}


def _needed(needs: Any) -> Any:
    return {"required": needs} if isinstance(needs, list) else needs


def _pattern_of(own: Mapping[str, Any]) -> str | None:
    """An expression for the texts that follow some keywords; None: there is none."""
    if own.keys() == {"pattern"}:
        pattern = own["pattern"]
        try:
            re.compile(pattern)
        except (re.error, TypeError):
            return None
        return str(pattern)
    if own.keys() == {"allOf"} and isinstance(own["allOf"], list) and len(own["allOf"]) == 1:
        (only,) = own["allOf"]
        return _pattern_of(only) if isinstance(only, dict) else None
    if own.keys() <= {"minLength", "maxLength"} and _are_numbers(*own.values()):
        most = str(int(own["maxLength"])) if "maxLength" in own else ""
        return f"^[\\s\\S]{{{int(own.get('minLength', 0))},{most}}}$"
    return None


def _beyond(key: str, value: Any) -> Any:
    """What does not keep to a bound."""
    if not _are_numbers(value):
        return None
    for name, kind in (("Length", "string"), ("Items", "array"), ("Properties", "object")):
        if key == f"min{name}":
            return {"type": kind, f"max{name}": math.ceil(value) - 1} if value > 0 else False
        if key == f"max{name}":
            return {"type": kind, f"min{name}": math.floor(value) + 1}
    opposite = {
        "minimum": "exclusiveMaximum",
        "maximum": "exclusiveMinimum",
        "exclusiveMinimum": "maximum",
        "exclusiveMaximum": "minimum",
    }
    return {"type": "number", opposite[key]: value} if key in opposite else None


def _not_of_types(types: Any) -> Any:
    if not _are_names(types) or not {*types} <= {*_TYPES, "integer"}:
        return None
    if "integer" in types and "number" not in types:
        return None  # numbers with a fraction have no name
    others = [one for one in _TYPES if one not in types]
    return {"type": others} if others else False


def _not_among(values: Sequence[Any]) -> Any:
    parts: list[Any] = []
    texts = {one for one in values if isinstance(one, str)}
    if texts:
        if sum(map(len, texts)) > _MOST_CHARACTERS or max(map(len, texts)) > _DEEPEST_PATTERN:
            return None
        parts.append({"pattern": f"^{_none_of(texts)}$"})
    for value in values:
        match value:
            case str():
                continue
            case None:
                parts.append(_not_of_types(["null"]))
            case bool():
                parts.append({"anyOf": [_not_of_types(["boolean"]), {"const": not value}]})
            case int() | float():
                below, above = ({key: value} for key in ("exclusiveMaximum", "exclusiveMinimum"))
                numbers = [{"type": "number", **one} for one in (below, above)]
                parts.append({"anyOf": [_not_of_types(["number"]), *numbers]})
            case []:
                parts.append(
                    {"anyOf": [_not_of_types(["array"]), {"type": "array", "minItems": 1}]}
                )
            case _:
                return None
    return _all_of(*parts) if len(parts) <= _MOST_PARTS else None


def _none_of(texts: Collection[str]) -> str:
    """An expression for all texts but these."""
    firsts = sorted({one[0] for one in texts if one})
    if not firsts:
        return "[\\s\\S]+"
    some = [
        escaped(first) + _none_of({one[1:] for one in texts if one[:1] == first})
        for first in firsts
    ]
    some.append(f"[^{''.join(map(escaped, firsts))}][\\s\\S]*")
    return f"({'|'.join(some)})" + ("" if "" in texts else "?")


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({_key(one): one for one in reversed(values)}.values())[::-1]


def _key(value: Any) -> str:
    """The same for values that JSON schemas take for the same."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def _type_names(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if value == int(value) else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
