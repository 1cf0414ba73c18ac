"""Calls that the model has to make, or may: what they must follow, in the family's own form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import evolve

from commutator.contract.conversation import Conversation, Tool, ToolChoice
from commutator.contract.parser import ForcedCalls
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_parsers.families import Family
from commutator_parsers.grammars import EitherCalls, JsonCalls, NamedCalls
from commutator_parsers.lark import (
    HARMONY,
    Form,
    calls_grammar,
    closer_of,
    form_of,
    free_grammar,
    literal,
)
from commutator_parsers.schemas import chosen_tools, moved

_ANY: Mapping[str, Any] = {"type": "object"}

_WHITESPACE = r"\n {0,24}| ?"
"""Between parts of JSON, where nobody else bounds it."""


def forced_choice(conversation: Conversation | None) -> ToolChoice | None:
    """The choice of tools, if it is one that forces calls."""
    choice = None if conversation is None else conversation.tool_choice
    return choice if choice is not None and choice.mode in {"required", "named"} else None


def form_of_calls(family: Family | None, template: str) -> JsonCalls | Form | None:
    """How a model with this chat template is made to write calls; None: it cannot be."""
    if family is None:
        return None
    if family.whole is not None:
        return HARMONY if family.whole == "harmony" else None
    grammar = family.grammar
    if isinstance(grammar, EitherCalls):
        grammar = grammar.behind_names if "[ARGS]" in template else grammar.with_names
    return grammar if isinstance(grammar, JsonCalls) else form_of(grammar, template)


def forced_opening(form: JsonCalls | Form, template: str) -> str:
    """What the model writes before the calls: the marker that its template has."""
    if isinstance(form, Form):
        return form.opened
    if form.line_openers:  # the JSON begins without one
        return ""
    known = (one for one in form.openers if one in template)
    return next(known, form.openers[0]) + form.after_opener


def in_prompt(
    form: JsonCalls | Form, opening: str, conversation: Conversation, specials: Mapping[str, int]
) -> ForcedCalls:
    """Where the answer begins behind ``opening``, with which the prompt ends."""
    if isinstance(form, Form):
        grammar = calls_grammar(form, conversation, specials, opened=True)
        return ForcedCalls(opening=opening, constraint=Constraint(kind="lark", value=grammar))
    value = json.dumps(_calls_schema(form, conversation))
    return ForcedCalls(opening=opening, constraint=Constraint(kind="json_schema", value=value))


def in_thoughts(
    form: JsonCalls | Form, opening: str, conversation: Conversation, specials: Mapping[str, int]
) -> ForcedCalls:
    """Where the answer begins with thoughts, and ``opening`` comes after them."""
    if isinstance(form, Form):
        value = calls_grammar(form, conversation, specials, opened=False)
    else:
        schema = _calls_schema(form, conversation)
        schema["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
        words = f"{literal(opening, specials)} %json {json.dumps(schema)}"
        value = f"start: SPACE? {words}\nSPACE: /\\n{{1,3}}/"
    return ForcedCalls(opening="", constraint=Constraint(kind="lark", value=value))


def where_it_calls(
    form: JsonCalls | Form, conversation: Conversation, specials: Mapping[str, int]
) -> Constraint:
    """Text in which the model may call: calls of strict tools follow their schemas.

    Those of others are any objects. Raises RequestError where the form has no words for that.
    """
    tools = tuple(one if one.strict else evolve(one, parameters=_ANY) for one in conversation.tools)
    if isinstance(form, Form):
        # Only objects in JSON can be of any shape; the other forms are held to their schemas.
        whole = form.grammar is None or isinstance(form.grammar, NamedCalls)
        held = evolve(conversation, tools=tools) if whole else conversation
        return Constraint(kind="lark", value=free_grammar(form, held, specials))
    if form.line_openers:
        raise RequestError(
            "tools: strict: no marker need begin this model's calls, so they cannot be held to "
            'schemas where it may call; leave strict out, or use tool_choice "required"',
            "tools",
            "unsupported_parameter",
        )
    schema = _calls_schema(form, evolve(conversation, tools=tools))
    structures = [
        {"begin": begin, "schema": schema, "end": end} for begin, end in _around_calls(form)
    ]
    triggers = [
        one
        for one in form.openers
        if not any(one != other and one.startswith(other) for other in form.openers)
    ]
    value = {"structures": structures, "triggers": triggers}
    return Constraint(kind="structural_tag", value=json.dumps(value))


def calls_or(
    answer: Constraint, form: JsonCalls | Form | None, conversation: Conversation
) -> Constraint:
    """JSON that follows ``answer``, or calls, as the model decides.

    It is ``answer`` alone, so that there are no calls, where that is not about JSON, and where the
    calls of the family are not JSON between markers. Raises RequestError as ``where_it_calls``.
    """
    if answer.kind not in {"json_object", "json_schema"}:
        return answer
    if not isinstance(form, JsonCalls) or form.line_openers:
        return answer
    schema = json.loads(str(answer.value)) if answer.value else _ANY
    tools = tuple(one if one.strict else evolve(one, parameters=_ANY) for one in conversation.tools)
    calls = {
        "type": "json_schema",
        "json_schema": _calls_schema(form, evolve(conversation, tools=tools)),
    }
    elements: list[dict[str, Any]] = [{"type": "json_schema", "json_schema": schema}]
    elements += [
        {"type": "tag", "begin": begin, "content": calls, "end": end}
        for begin, end in _around_calls(form)
    ]
    value = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    return evolve(answer, kind="structural_tag", value=json.dumps(value))


def _around_calls(form: JsonCalls) -> list[tuple[str, str]]:
    """What may stand before calls, and what stands after them then."""
    return [
        (f"{opener}{form.after_opener}", f"{form.after_opener}{closer_of(form, opener)}")
        for opener in form.openers
    ]


def special_marks(text: str, specials: Collection[str]) -> Sequence[tuple[int, int]]:
    """The special tokens in ``text``, as (offset, length)."""
    known = [re.escape(one) for one in sorted(specials, key=len, reverse=True) if one in text]
    if not known:
        return ()
    return [(one.start(), len(one[0])) for one in re.finditer("|".join(known), text)]


def _calls_schema(grammar: JsonCalls, conversation: Conversation) -> dict[str, Any]:
    """The JSON schema of all that the answer may be. Raises RequestError."""
    choice = conversation.tool_choice
    schemas: dict[str, Any] = {}
    try:
        calls = [_call_schema(grammar, tool, schemas) for tool in chosen_tools(conversation)]
    except RecursionError:
        raise RequestError("tools: parameters are nested too deeply", "tools") from None
    found: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if grammar.listed:
        found = {"type": "array", "items": found, "minItems": 1}
        if choice is not None and not choice.parallel:
            found["maxItems"] = 1
    return {**found, "$defs": schemas} if schemas else found


def _call_schema(grammar: JsonCalls, tool: Tool, schemas: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments_schema(tool, schemas)
    if grammar.keyed:
        properties = {tool.name: arguments}
    else:
        properties = {grammar.name_key: {"const": tool.name}, grammar.argument_key: arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool, schemas: dict[str, Any]) -> dict[str, Any]:
    """``schemas`` gets a tool's parameters with references, which are to be from the root."""
    given = {key: one for key, one in tool.parameters.items() if key not in {"$schema", "$id"}}
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "$ref" not in given:
        given["type"] = "object"
    place = f"tool{len(schemas)}"
    placed = moved(given, f"#/$defs/{place}")
    if placed == given:
        return given
    schemas[place] = placed
    return {"$ref": f"#/$defs/{place}"}
