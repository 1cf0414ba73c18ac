"""`oneOf` becomes `anyOf` only where that allows the same values."""

from __future__ import annotations

from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator_reference.alternatives import with_any_of

VALUES = st.sampled_from([None, True, 1, 1.0, 2.5, "a", "b", [], [1], {}, {"k": "a"}, {"k": 1}])
PARTS = st.one_of(
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(
        lambda name: {"type": name}
    ),
    st.lists(st.sampled_from(["null", "integer", "string"]), min_size=1).map(
        lambda names: {"type": names}
    ),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from([{}, True, {"$ref": "#/$defs/text"}, {"$ref": "#/$defs/tagged"}]),
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
SCHEMAS = st.recursive(
    PARTS,
    lambda part: st.builds(
        lambda name, some: {name: some},
        st.sampled_from(["oneOf", "anyOf", "allOf"]),
        st.lists(part, min_size=1, max_size=3),
    ),
    max_leaves=6,
)
DEFINED = {
    "text": {"type": "string"},
    "tagged": {"type": "object", "properties": {"k": {"enum": ["a"]}}, "required": ["k"]},
}


def matches(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@settings(max_examples=300, deadline=None)
@given(some=st.lists(SCHEMAS, min_size=1, max_size=4), value=VALUES)
def test_the_same_values_match(some: list[Any], value: Any) -> None:
    schema = {"oneOf": some, "$defs": DEFINED}
    assert matches(value, with_any_of(schema)) == matches(value, schema)


def test_what_is_apart_by_its_types_or_by_a_key_becomes_one_of_several() -> None:
    kinds = [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/text"}}]
    tagged = [
        {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in "ab"
    ]
    for some in (kinds, tagged, [*tagged, {"type": "null"}]):
        found = with_any_of({"items": {"oneOf": some}, "$defs": DEFINED})
        assert found["items"] == {"anyOf": some}
    assert with_any_of({"oneOf": [True, {"type": "object"}]}) == {
        "oneOf": [True, {"type": "object"}]
    }
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert with_any_of(overlapping) == overlapping
