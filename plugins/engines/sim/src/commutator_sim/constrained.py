"""Texts that follow a constraint: JSON, one of several texts, text without tags. Pure.

The same request gets the same text, so that another worker can go on with it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any, NoReturn

from commutator.contract.request import Constraint, ConstraintKind
from commutator.errors import RequestError
from commutator_sim.following import alternatives
from commutator_sim.schemas import JOINED, NOTES, OF_TYPE, json_types, referred, within

KINDS: tuple[ConstraintKind, ...] = ("json_object", "json_schema", "choice", "structural_tag")
"""What this engine follows."""

_OF_TYPES = set().union(*OF_TYPE.values())
_DEEP = 6
"""From this depth on, nothing is said that need not be."""
_DEEPEST = 40
_MOST = 10_000
"""Values in one text."""
_LONGEST = 1000
"""Items and characters that a schema may demand at once."""
_WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "joule"]


def constrained_text(constraint: Constraint, seed: int) -> str:
    """A text that follows it. Raises RequestError, naming a keyword that is not followed here."""
    chance = random.Random(seed)  # noqa: S311
    if constraint.kind == "choice":
        return chance.choice(constraint.value)
    if constraint.whitespace is not None:
        _refuse("whitespace_pattern")
    if constraint.kind == "structural_tag":
        tags = json.loads(str(constraint.value))
        schema = _schema_alone(tags)
        if schema is None:
            return _text_without(tags, chance)
    elif constraint.kind == "json_object":
        return json.dumps({chance.choice(_WORDS): chance.choice(_WORDS)})
    else:
        schema = json.loads(str(constraint.value))
    try:
        value = _Maker(schema, chance).make(schema, 0)
    except (TypeError, AttributeError, ValueError, KeyError, OverflowError) as error:
        _refuse(f"what is no JSON schema ({error})")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _schema_alone(tags: Any) -> Any:
    """The schema of an answer that may be JSON or something else; None: it may be any text."""
    try:
        return next(one["schema"] for one in alternatives(tags) if not one["begin"])
    except (TypeError, ValueError, KeyError, StopIteration):
        return None


def _text_without(tags: Any, chance: random.Random) -> str:
    """A text without a trigger, after which something else would have to follow."""
    triggers = tags.get("triggers") if isinstance(tags, dict) else None
    if not isinstance(triggers, list) or "structures" not in tags:
        _refuse("a structural tag without structures and triggers")
    words = [one for one in _WORDS if not any(each in one for each in triggers)]
    return chance.choice(words) if words else _refuse("triggers that all words contain")


def _refuse(what: str) -> NoReturn:
    raise RequestError(
        f"response_format: the sim engine cannot follow {what}; leave it out, or ask a worker of "
        "another engine",
        "response_format",
        "invalid_value",
    )


class _Maker:
    """Makes values of one schema document."""

    def __init__(self, root: Any, chance: random.Random) -> None:
        self._root = root
        self._chance = chance
        self._left = _MOST

    def make(self, schema: Any, depth: int) -> Any:
        if schema is True or schema == {}:
            return self._chance.choice(_WORDS)
        if not isinstance(schema, Mapping):
            _refuse("the schema false" if schema is False else f"{schema!r:.60} as a schema")
        self._left -= 1
        if depth > _DEEPEST or not self._left:
            _refuse("a schema that demands endless nesting")
        own = {key: value for key, value in schema.items() if key not in NOTES}
        joined = [key for key in JOINED if key in own]
        if joined:
            return self._make_joined(joined[0], own, depth)
        kind = own.pop("type", None) or self._type_of(own)
        if isinstance(kind, list):
            kind = "null" if depth > _DEEP and "null" in kind else self._chance.choice(kind)
        if kind not in OF_TYPE:
            _refuse(f"type {kind!r}")
        for key in own.keys() - _OF_TYPES:  # those of another type say nothing about this one
            _refuse(f"the keyword {key!r}")
        return getattr(self, f"_{kind}")(own, depth)

    def _type_of(self, own: Mapping[str, Any]) -> str:
        """The first type of which the schema without ``type`` says something."""
        for key in own:
            if key not in _OF_TYPES:
                _refuse(f"the keyword {key!r}")
        return next((kind for kind, known in OF_TYPE.items() if known & own.keys()), "string")

    def _make_joined(self, key: str, own: dict[str, Any], depth: int) -> Any:
        value = own.pop(key)
        if key in ("enum", "const"):
            if own.keys() - {"type"}:
                _refuse(f"{key!r} beside {min(own.keys() - {'type'})!r}")
            return self._fixed(value if key == "enum" else [value], own.get("type"))
        if own:
            _refuse(f"{key!r} beside {min(own)!r}")
        if key == "$ref":
            return self.make(self._referred(value), depth + 1)
        if len(value) == 1:
            return self.make(value[0], depth + 1)
        if key != "anyOf" and not (key == "oneOf" and _differ(value)):
            _refuse(f"{key!r} of several schemas")
        if depth <= _DEEP:
            return self.make(self._chance.choice(value), depth + 1)
        problem: RequestError | None = None
        for one in value:  # the first that ends
            try:
                return self.make(one, depth + 1)
            except RequestError as error:
                problem = error
        raise problem or RequestError("response_format: anyOf is empty", "response_format")

    def _fixed(self, values: list[Any], kind: Any) -> Any:
        kinds = kind if isinstance(kind, list) else [kind]
        fitting = [one for one in values if kind is None or json_types(one) & {*kinds}]
        return self._chance.choice(fitting) if fitting else _refuse("an enum without a value")

    def _referred(self, reference: Any) -> Any:
        try:
            return referred(self._root, reference)
        except ValueError as error:
            _refuse(str(error))

    def _object(self, own: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = own.get("properties", {}), own.get("required", [])
        made = {
            name: self.make(schema, depth + 1)
            for name, schema in properties.items()
            if name in required or (depth < _DEEP and schema is not False)
        }
        more = own.get("additionalProperties", True)
        return made | {name: self.make(more, depth + 1) for name in required if name not in made}

    def _array(self, own: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = own.get("prefixItems", []), own.get("items", True)
        least, most = own.get("minItems", 0), own.get("maxItems", math.inf)
        wanted = 0 if depth >= _DEEP else max(len(first), 1 if rest is not False else 0)
        count = int(min(max(least, wanted), most))
        _check_range(least, most, "minItems")
        schemas = [*first, *(rest for _ in range(len(first), count))][:count]
        return [self.make(one, depth + 1) for one in schemas]

    def _string(self, own: Mapping[str, Any], _depth: int) -> str:
        least, most = own.get("minLength", 0), own.get("maxLength", _LONGEST)
        _check_range(least, most, "minLength")
        text = self._chance.choice(_WORDS)
        return (text * (least // len(text) + 1) if least > len(text) else text)[
            : int(max(least, min(most, len(text))))
        ]

    def _integer(self, own: Mapping[str, Any], _depth: int) -> int:
        least = max(
            math.ceil(own.get("minimum", -math.inf)) if "minimum" in own else -math.inf,
            math.floor(own["exclusiveMinimum"]) + 1 if "exclusiveMinimum" in own else -math.inf,
        )
        most = min(
            math.floor(own["maximum"]) if "maximum" in own else math.inf,
            math.ceil(own["exclusiveMaximum"]) - 1 if "exclusiveMaximum" in own else math.inf,
        )
        if least > most:
            _refuse("bounds that no integer meets")
        if least == -math.inf:
            least = min(0, most)
        return int(self._chance.randint(int(least), int(min(most, least + 99))))

    def _number(self, own: Mapping[str, Any], _depth: int) -> float:
        least = max(own.get("minimum", -math.inf), own.get("exclusiveMinimum", -math.inf))
        most = min(own.get("maximum", math.inf), own.get("exclusiveMaximum", math.inf))
        if least > most:
            _refuse("bounds that no number meets")
        low = least if least > -math.inf else min(0.0, most - 1)
        high = most if most < math.inf else max(low + 1, 1.0)
        value: float = low if low == high else low + (high - low) / 2
        if not within(own, value):
            _refuse("bounds that are too close")
        return value

    def _boolean(self, _own: Mapping[str, Any], _depth: int) -> bool:
        return self._chance.choice((True, False))

    def _null(self, _own: Mapping[str, Any], _depth: int) -> None:
        return None


def _check_range(least: float, most: float, name: str) -> None:
    if least > most:
        _refuse(f"{name} above its maximum")
    if least > _LONGEST:
        _refuse(f"{name} above {_LONGEST}")


def _differ(schemas: list[Any]) -> bool:
    """Whether no value can have the types of two of them."""
    kinds = [one.get("type") for one in schemas]
    kinds = ["number" if one == "integer" else one for one in kinds]
    return len(set(kinds)) == len(kinds) and all(one in OF_TYPE for one in kinds)
