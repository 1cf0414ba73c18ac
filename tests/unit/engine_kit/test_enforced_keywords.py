"""Which keywords of a schema other libraries than llguidance would ignore, so that we refuse it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commutator import Constraint
from commutator.errors import RequestError
from commutator_engine_kit.constraints import check_enforced

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"minimum": 3}, "minimum without a type"),
        ({"pattern": "^a+$"}, "pattern without a type"),
        ({"required": ["a"]}, "required"),
        ({**INTEGER, "multipleOf": 5}, "multipleOf"),
        ({**TEXT, "pattern": "^a+$", "maxLength": 1}, "maxLength beside pattern"),
        ({**TEXT, "format": "idn-email"}, "format idn-email"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": INTEGER}, "contains"),
        ({"type": "object", "required": ["b"]}, "required of 'b'"),
        ({"not": TEXT}, "not"),
        ({**TEXT, "not": {"enum": ["a"]}}, "not"),
        ({"type": "object", "if": {"required": ["a"]}, "then": False}, "if"),
        ({"anyOf": [INTEGER, TEXT], "maximum": 3}, "maximum beside anyOf"),
        ({**TEXT, "anyOf": [{"maxLength": 1}, TEXT]}, "type beside anyOf"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "only one of oneOf"),
        ({"allOf": [INTEGER], "maximum": 3}, "maximum beside allOf"),
        ({"allOf": [INTEGER, {"maximum": 3}]}, "allOf"),
        ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": INTEGER}}, "maximum beside"),
        ({"enum": ["a", 1], **TEXT}, "type beside enum"),
        ({"enum": ["a", "bb"], "maxLength": 1}, "maxLength beside enum"),
        ({"const": 1, **TEXT}, "type beside const"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {"a": {"not": TEXT}}}, "not"),
        ({"type": "array", "items": {"anyOf": [{"not": TEXT}]}}, "not"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": TEXT}}}, "not"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(schema: Any, named: str) -> None:
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<"]}
    newer = {"format": {"tags": [{"content": {"type": "json_schema", "json_schema": schema}}]}}
    for constraint in (
        Constraint(kind="json_schema", value=json.dumps(schema)),
        Constraint(kind="structural_tag", value=json.dumps(tag)),
        Constraint(kind="structural_tag", value=json.dumps(newer)),
    ):
        with pytest.raises(RequestError, match=named) as refused:
            check_enforced(constraint, "the server")
        assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"title": "a", "description": "not", "default": {"not": 1}},
        {**INTEGER, "minimum": 3, "exclusiveMaximum": 9},
        {"type": ["integer", "null"], "maximum": 3},
        {**TEXT, "minLength": 1, "maxLength": 3},
        {**TEXT, "minimum": 3},  # of numbers, and texts need not follow it
        {**TEXT, "pattern": "^a+$"},
        {**TEXT, "format": "date"},
        {"enum": ["a", 1]},
        {"enum": ["a", "b"], **TEXT},
        {"const": None, "type": ["null", "string"]},
        {"anyOf": [INTEGER, TEXT]},
        {"oneOf": [INTEGER, TEXT]},
        {"allOf": [INTEGER]},
        {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}},
        {
            "type": "object",
            "properties": {"a": INTEGER, "not": TEXT},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    ],
)
def test_what_is_enforced_passes(schema: Any) -> None:
    check_enforced(Constraint(kind="json_schema", value=json.dumps(schema)), "the server")


def test_other_constraints_pass() -> None:
    for one in (
        Constraint(kind="json_object"),
        Constraint(kind="regex", value="a"),
        Constraint(kind="choice", value=("a",)),
    ):
        check_enforced(one, "the server")
