"""Schemas mean the same after they are written in the keywords that are enforced."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commutator_engine_kit.constraints.rewriting import rewritten

TEXTS = st.sampled_from(["", "a", "b", "ab", "ba", "a\n", "é", "aab"])
SCALARS = st.one_of(st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, -3]), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda one: st.one_of(
        st.lists(one, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "k", "ab"]), one, max_size=3),
    ),
    max_leaves=5,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
KEYS = st.lists(st.sampled_from(["a", "b", "k"]), max_size=2, unique=True)
BOUNDS = st.builds(
    lambda name, bound: {name: bound},
    st.sampled_from(
        [
            *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        ]
    ),
    st.integers(0, 3),
)
PARTS = st.one_of(
    TYPES.map(lambda name: {"type": name}),
    st.lists(TYPES, min_size=1, max_size=3).map(lambda names: {"type": names}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from([{}, True, False, {"$ref": "#/$defs/text"}, {"$ref": "#/$defs/tagged"}]),
    BOUNDS,
    KEYS.map(lambda keys: {"required": keys}),
    st.builds(
        lambda value, required: {
            "type": "object",
            "properties": {"k": {"const": value}},
            "required": required,
        },
        st.sampled_from(["a", 1, 1.0]),
        st.sampled_from([[], ["k"]]),
    ),
)


def larger(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(part, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b", "not", "oneOf"]), part, max_size=2)
    names = st.sampled_from([{"pattern": "^a"}, {"minLength": 2}, {"enum": ["a", "k"]}, False, {}])
    items = st.one_of(part, st.sampled_from([{"enum": ["a", "b", 1]}, {"type": "boolean"}]))
    return st.one_of(
        st.builds(lambda name, given: {name: given}, st.sampled_from(["oneOf", "anyOf"]), some),
        st.builds(lambda given: {"allOf": given}, some),
        st.builds(lambda one, given: {**one, "not": given}, named.map(properties), part),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, part, part, part),
        st.builds(
            lambda given, key, rest: {**properties(given), "propertyNames": key, **rest},
            named,
            names,
            st.sampled_from([{}, {"additionalProperties": False}]),
        ),
        st.builds(lambda key, needs: {"dependentRequired": {key: needs}}, TEXTS, KEYS),
        st.builds(lambda key, one: {"dependentSchemas": {key: one}}, st.just("a"), part),
        st.builds(
            lambda one, most: {"type": "array", "items": one, "uniqueItems": True, **most},
            items,
            st.sampled_from([{}, {"maxItems": 1}, {"maxItems": 2}, {"minItems": 1}]),
        ),
    )


def properties(given: dict[str, Any]) -> dict[str, Any]:
    return {"properties": given}


SCHEMAS = st.recursive(PARTS, larger, max_leaves=6)
DEFINED = {
    "text": {"type": "string"},
    "tagged": {"type": "object", "properties": {"k": {"enum": ["a"]}}, "required": ["k"]},
}


def matches(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@settings(max_examples=400, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
@example({"not": {"enum": ["a", "ab"]}}, "a\n")
@example({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 1})
def test_the_same_values_match(schema: Any, value: Any) -> None:
    whole = {"allOf": [schema], "$defs": DEFINED}
    assert matches(value, rewritten(whole)) == matches(value, whole)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"enum": ["a", "日本", ""]}},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 1},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        {"properties": {"a": {"not": {}}}, "type": "object"},
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"dependentRequired": {"a": ["b"]}},
        {
            "properties": {"kind": {"enum": ["x", "y"]}},
            "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
            "then": {"required": ["size"]},
        },
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/text"}}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
                for name in "ab"
            ]
        },
        {"properties": {"not": {"type": "string"}, "if": {"const": 1}, "oneOf": {"const": 2}}},
    ],
)
def test_keywords_that_others_can_say_are_gone(schema: dict[str, Any]) -> None:
    found = rewritten({**schema, "$defs": DEFINED})
    names = {"not", "if", "then", "propertyNames", "uniqueItems", "dependentRequired", "oneOf"}
    assert not names & {*keywords(found)}


def keywords(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for one in schema for name in keywords(one)]
    if not isinstance(schema, dict):
        return []
    found = [*schema]
    for key, value in schema.items():
        if key in {"properties", "patternProperties", "$defs"}:
            found += [name for one in value.values() for name in keywords(one)]
        elif key not in {"enum", "const"}:
            found += keywords(value)
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [True, {"pattern": "a"}]},
        {"oneOf": [{"type": "integer"}, {"type": "number", "multipleOf": 2}]},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"not": {"pattern": "a"}},
        {"if": {"format": "uuid"}, "then": {"maxLength": 40}},
    ],
)
def test_what_cannot_be_said_otherwise_is_left(schema: dict[str, Any]) -> None:
    assert rewritten(schema) == schema
