"""What answers have to follow, in the words of three APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commutator.contract.conversation import Generate
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator.frontend.request.planning import _check_constraint
from commutator_openai.chat import parse_body
from commutator_openai.constraints import constraint_of
from commutator_openai.requests import ChatRequest

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}}
TEXT = '{"type":"object","properties":{"z":{},"a":{}}}'
JSON = Constraint(kind="json_schema", value=TEXT)


def read(**fields: Any) -> Constraint | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return constraint_of(parse_body(ChatRequest, json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JSON,
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint(kind="choice", value=("a",))),
        ({"structured_outputs": {"json_object": True}}, Constraint(kind="json_object")),
        ({"guided_json": TEXT}, JSON),
        ({"guided_json_object": False}, None),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            Constraint(kind="json_schema", value=TEXT, whitespace=" ?"),
        ),
        ({"guided_regex": "a+"}, Constraint(kind="regex", value="a+")),
        ({"regex": "a+"}, Constraint(kind="regex", value="a+")),
        ({"ebnf": 'root ::= "a"'}, Constraint(kind="grammar", value='root ::= "a"')),
        ({"json_schema": TEXT}, JSON),
    ],
)  # fmt: skip
def test_each_word_says_one_thing(fields: dict[str, Any], wanted: Constraint | None) -> None:
    assert read(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 3}, "guided_regex"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("param", ["response_format", "tools"])
def test_what_is_too_long_is_refused_whatever_protocol_asked(param: str) -> None:
    fits = Constraint(kind="choice", value=("a" * 65536, "b" * 65536))
    _check_constraint(Generate(model="m", constraint=fits), param)
    too_long = Constraint(kind="choice", value=("a" * 65536, "b" * 65537))
    with pytest.raises(RequestError, match="at most 131072") as refused:
        _check_constraint(Generate(model="m", constraint=too_long), param)
    assert refused.value.param == param
