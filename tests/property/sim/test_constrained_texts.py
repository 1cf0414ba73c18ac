"""Texts of the sim engine validate by the schema that was asked for, or it is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_sim.constrained import constrained_text

bounds = st.integers(-20, 20)
sizes = st.integers(0, 12)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


names = st.sampled_from(["a", "b", "c", "d"])
scalars = st.one_of(
    st.just({}),
    optional(minimum=bounds, maximum=bounds, exclusiveMinimum=bounds, exclusiveMaximum=bounds).map(
        lambda one: {"type": "number", **one}
    ),
    optional(minimum=bounds, maximum=bounds, exclusiveMaximum=bounds).map(
        lambda one: {"type": "integer", **one}
    ),
    optional(minLength=sizes, maxLength=sizes).map(lambda one: {"type": "string", **one}),
    st.sampled_from([{"type": "boolean"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/node"}]),
    st.lists(st.one_of(st.none(), st.booleans(), bounds, st.text(max_size=3)), min_size=1).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "string", "pattern": "a+"}, {"const": {"x": [1]}}]),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        optional(
            properties=st.dictionaries(names, inner, max_size=3),
            required=st.lists(names, unique=True, max_size=3),
            additionalProperties=st.one_of(st.booleans(), inner),
        ).map(lambda one: {"type": "object", **one}),
        optional(
            items=st.one_of(inner, st.booleans()),
            prefixItems=st.lists(inner, min_size=1, max_size=2),
            minItems=sizes,
            maxItems=sizes,
        ).map(lambda one: {"type": "array", **one}),
        st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1)).map(
            lambda one: {one[0]: one[1][:3]}
        ),
    )


NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
}


@settings(max_examples=200)
@given(st.recursive(scalars, nested, max_leaves=8), st.integers())
def test_a_text_validates_or_was_refused(schema: dict[str, Any], seed: int) -> None:
    schema = {**schema, "$defs": {"node": NODE}}
    constraint = Constraint(kind="json_schema", value=json.dumps(schema))
    try:
        text = constrained_text(constraint, seed)
    except RequestError as error:
        assert error.param == "response_format"  # noqa: PT017 - or the text is looked at
        return
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert constrained_text(constraint, seed) == text


def test_what_programs_ask_for_is_served() -> None:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "title": "Name"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "age", "tags", "parent"],
        "additionalProperties": False,
    }
    for seed in range(20):
        text = constrained_text(Constraint(kind="json_schema", value=json.dumps(person)), seed)
        jsonschema.validate(json.loads(text), person)
    assert isinstance(json.loads(constrained_text(Constraint(kind="json_object"), 1)), dict)
    assert constrained_text(Constraint(kind="choice", value=("x", "y")), 3) in ("x", "y")


@pytest.mark.parametrize("keyword", ["pattern", "format", "multipleOf", "uniqueItems", "not"])
def test_a_keyword_that_is_not_followed_is_named(keyword: str) -> None:
    constraint = Constraint(kind="json_schema", value=json.dumps({keyword: "x"}))
    with pytest.raises(RequestError, match=f"cannot follow the keyword '{keyword}'") as caught:
        constrained_text(constraint, 0)
    assert caught.value.param == "response_format"


def test_endless_schemas_are_refused() -> None:
    endless = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}
    required = {**endless, "required": ["l", "r"]}
    with pytest.raises(RequestError, match="endless"):
        constrained_text(Constraint(kind="json_schema", value=json.dumps(required)), 0)
    assert constrained_text(Constraint(kind="json_schema", value=json.dumps(endless)), 0)
