"""Constraints as llguidance takes them. It refuses every keyword of a schema that it lacks."""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve

from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_engine_kit.constraints.rewriting import rewritten
from commutator_engine_kit.constraints.structural_tags import added_tokens, lark_of_tags

_WHITESPACE = r"\n {0,24}| ?"
"""Between parts of JSON: a line's end and an indentation, or a space. Without a bound a small model
writes nothing else for ever."""


def enforced(schema: Any, whitespace: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """``schema`` in keywords that llguidance enforces, and its options (`x-guidance`).

    ``whitespace`` as of ``Constraint``. Raises ValueError.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError("expected an object")  # noqa: TRY004 - as for every other mistake
    found = rewritten(schema)
    if found is False:
        raise ValueError("no value follows the schema: it excludes all")
    between = _WHITESPACE if whitespace is None else whitespace
    options: dict[str, Any] = {"whitespace_flexible": bool(between)}
    if between:
        options["whitespace_pattern"] = between
    return {} if found is True else found, options


def _with_separators(whitespace: str | None) -> dict[str, Any]:
    """Options for servers, whose llguidance may repeat a pattern for white space without end.

    So what is asked for stands beside commas and colons only, and once.
    """
    if whitespace is None:
        return {}
    item, key = ",", ":"
    if whitespace:
        item, key = (f"(?:{whitespace})?{one}(?:{whitespace})?" for one in (item, key))
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return {"x-guidance": options}


def of_lark(grammar: str) -> str:
    """A grammar in Lark whose texts may be written with any tokens.

    Otherwise, where one text alone can follow, llguidance asks for the tokens that its tokenizer
    makes of it, and takes none of those that are special.
    """
    return f'{grammar}\n%llguidance {{"no_forcing": true}}'


def _for_server(schema: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return enforced(schema)[0], {}


def written(constraint: Constraint) -> Constraint:
    """``constraint`` for a server that gives schemas and grammars to llguidance as they are.

    JSON becomes a "json_schema" with its white space in it, a structural tag a "grammar". Raises
    RequestError.
    """
    value = constraint.value
    try:
        match constraint.kind:
            case "json_object" | "json_schema":
                schema = json.loads(str(value)) if value else {"type": "object"}
                found, _ = enforced(schema)
                text = json.dumps({**found, **_with_separators(constraint.whitespace)})
                return evolve(constraint, kind="json_schema", value=text, whitespace=None)
            case "structural_tag":
                tags = json.loads(str(value))
                grammar = of_lark(lark_of_tags(tags, added_tokens(tags), _for_server))
                return evolve(constraint, kind="grammar", value=grammar, whitespace=None)
    except ValueError as error:
        problem = f"response_format: {constraint.kind}: {error}"
        raise RequestError(problem, "response_format", "invalid_value") from error
    return constraint
