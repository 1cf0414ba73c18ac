"""Reads requests: bodies of the Responses API become what core asks, in no protocol's words.

Clients of many versions send many fields. Those without an effect here are named in the answer's
X-Commutator-Ignored; those that ask for what cannot be done are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, field

from commutator.contract.conversation import Conversation, Generate, Message
from commutator.contract.request import Constraint
from commutator.frontend import thinking_variables
from commutator_openai.values import (
    METADATA,
    integer,
    is_metadata,
    not_served,
    number,
    optional,
    required,
    shown,
    without_nulls,
    wrong,
)
from commutator_responses.items import Item, messages_of
from commutator_responses.tools import ServerTools, Toolbox, read_toolbox

PARAMS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
}
_MAX_TOKENS = 2**31 - 1
_MAX_NAME = 256
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS,)
_WITHOUT_DATA = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What may be included, and is never there: of tools of OpenAI's servers, and what is encrypted."""

_OF_CONVERSATION = frozenset({
    *("input", "instructions", "model", "parallel_tool_calls", "previous_response_id"),
    *("reasoning", "text", "tool_choice", "tools", "truncation"),
})  # fmt: skip
_READ = _OF_CONVERSATION | {
    *("background", "conversation", "frequency_penalty", "ignore_eos", "include", "metadata"),
    *("max_output_tokens", "max_tool_calls", "min_p", "presence_penalty", "priority", "prompt"),
    *("prompt_cache_key", "repetition_penalty", "safety_identifier", "seed", "service_tier"),
    *("stop", "store", "stream", "stream_options", "temperature", "top_k", "top_logprobs", "top_p"),
    *("cache_salt", "context_management", "enable_response_messages", "user"),
}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_usage": True}),
}
"""Values of fields without effect that ask for what is done anyway."""


@define
class Asked:
    """A request that was read."""

    generate: Generate
    toolbox: Toolbox
    echo: dict[str, Any]
    """The fields of the response that repeat the request."""
    stores: bool
    """Whether the client wants the response to be kept."""
    in_background: bool
    """Whether the client comes back for it."""
    ignored: list[str] = field(factory=list)
    """The fields that have no effect."""


def read_request(
    body: Mapping[str, Any],
    items: Sequence[Item],
    *,
    server_tools: ServerTools,
    earlier: int = 0,
) -> Asked:
    """Body of POST /v1/responses; ``items`` are its input, after ``earlier`` ones of before.

    Raises RequestError that names the field.
    """
    given = without_nulls(body)
    _refuse(given)
    conversation, toolbox, ignored = read_conversation(
        body, items, server_tools=server_tools, earlier=earlier
    )
    ignored = sorted({*ignored, *(given.keys() - _READ), *_without_effect(given)})
    stops = given.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not _all_strings(stops):
        raise wrong("stop", f"expected at most {_MAX_STOPS} strings")
    user = _label(given, "safety_identifier") or _label(given, "user")
    generate = Generate(
        model=optional(given, "model", str, "a name from /v1/models"),
        conversation=conversation,
        stream=bool(optional(given, "stream", bool, "true or false")),
        max_tokens=integer(given, "max_output_tokens", 1, _MAX_TOKENS),
        temperature=number(given, "temperature", 0, 2),
        top_p=number(given, "top_p", 0, 1),
        top_k=integer(given, "top_k"),
        min_p=number(given, "min_p", 0, 1),
        seed=integer(given, "seed"),
        presence_penalty=number(given, "presence_penalty", -2, 2),
        frequency_penalty=number(given, "frequency_penalty", -2, 2),
        repetition_penalty=number(given, "repetition_penalty", 0, 10),
        top_logprobs=_top_logprobs(given),
        stop=tuple(stops),
        ignore_eos=bool(optional(given, "ignore_eos", bool, "true or false")),
        user=user,
        session_id=_label(given, "prompt_cache_key"),
        priority=integer(given, "priority"),
        cache_salt=_label(given, "cache_salt"),
        token_ids=bool(optional(given, "enable_response_messages", bool, "true or false")),
        constraint=_constraint(given),
        params=PARAMS,
    )
    if generate.top_p == 0:  # the likeliest token alone
        generate.top_p, generate.top_k = None, 1
    if generate.repetition_penalty == 0:
        raise wrong("repetition_penalty", "expected a number above 0, got 0")
    return Asked(
        generate=generate,
        toolbox=toolbox,
        echo=_echo(given, toolbox, user),
        stores=optional(given, "store", bool, "true or false") is not False,
        in_background=bool(optional(given, "background", bool, "true or false")),
        ignored=ignored,
    )


def read_conversation(
    body: Mapping[str, Any],
    items: Sequence[Item],
    *,
    server_tools: ServerTools,
    earlier: int = 0,
) -> tuple[Conversation, Toolbox, list[str]]:
    """What is said, the tools, and the fields without effect, as input_tokens has them, too."""
    given = without_nulls(body)
    toolbox = read_toolbox(given, server_tools)
    ignored = [*toolbox.ignored]
    instructions = optional(given, "instructions", str, "a string")
    truncation = given.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise wrong("truncation", f'expected "auto" or "disabled", got {shown(truncation)}')
    messages = messages_of(items, server_tools, ignored, earlier)
    if not messages:
        required(given, "input", list, "a text or at least one item that says something")
        raise wrong("input", "expected a text or at least one item that says something")
    if instructions:
        messages.insert(0, Message(role="system", content=instructions))
    variables = _template_variables(given, ignored)
    return (
        Conversation(
            messages=messages,
            tools=toolbox.tools,
            tool_choice=toolbox.choice if toolbox.tools else None,
            variables=variables or None,
        ),
        toolbox,
        ignored,
    )


def _refuse(given: Mapping[str, Any]) -> None:
    """What would change the answer or its life, and cannot be done."""
    for name, instead in (
        ("conversation", "send `previous_response_id` or the items themselves"),
        ("prompt", "send its text as `instructions` and `input`"),
    ):
        if name in given:
            raise not_served(name, f"what OpenAI's servers keep is not here; {instead}")
    if given.get("context_management"):
        text = (
            "nothing is compacted unasked: send what /v1/responses/compact returns, or truncation: "
        )
        text += "auto"
        raise not_served("context_management", text)


def _without_effect(given: Mapping[str, Any]) -> list[str]:
    found = [
        name for name, neutral in _NEUTRAL.items() if name in given and given[name] not in neutral
    ]
    include = optional(given, "include", list, "a list of strings") or []
    for place, one in enumerate(include):
        if one in _WITHOUT_DATA:
            found.append("include")
        elif one not in _INCLUDED:
            known = ", ".join(sorted({*_INCLUDED, *_WITHOUT_DATA}))
            raise wrong(f"include.{place}", f"{shown(one)} is not known; these are: {known}")
    if integer(given, "max_tool_calls", 1) is not None:  # of tools that servers run
        found.append("max_tool_calls")
    return found


def _top_logprobs(given: Mapping[str, Any]) -> int | None:
    alternatives = integer(given, "top_logprobs", 0, _MAX_LOGPROBS)
    if alternatives or _LOGPROBS in (given.get("include") or ()):
        return alternatives or 0
    return None


def _template_variables(given: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """What templates of models that reason know: whether to, and how much."""
    reasoning = optional(given, "reasoning", dict, "an object") or {}
    effort = optional(reasoning, "effort", str, "a string", "reasoning")
    ignored += [
        f"reasoning.{name}" for name in sorted(reasoning) if name != "effort" and reasoning[name]
    ]
    text = optional(given, "text", dict, "an object") or {}
    if text.get("verbosity") not in (None, "medium"):
        ignored.append("text.verbosity")
    # An effort asks models to think that would not by themselves.
    return thinking_variables(effort, effort is not None or None)


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    """What `text.format` says of the answer's text."""
    text = optional(given, "text", dict, "an object") or {}
    form = optional(text, "format", dict, "an object", "text") or {"type": "text"}
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint(kind="json_object")
        case "json_schema":
            schema = required(form, "schema", dict, "a JSON Schema, an object", "text.format")
            return Constraint(kind="json_schema", value=msgspec.json.encode(schema).decode())
        case other:
            known = '"text", "json_object" or "json_schema"'
            raise wrong("text.format.type", f"expected {known}, got {shown(other)}")


def _echo(given: Mapping[str, Any], toolbox: Toolbox, user: str | None) -> dict[str, Any]:
    """As clients expect them, also those that were not sent."""
    reasoning = given.get("reasoning") or {}
    text = given.get("text") or {}
    return {
        "background": given.get("background", False),
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "metadata": _metadata(given),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": user,
        "service_tier": "default",
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": toolbox.shown_choice,
        "tools": toolbox.shown,
        "top_logprobs": given.get("top_logprobs", 0),
        "truncation": given.get("truncation", "disabled"),
    }


def _metadata(given: Mapping[str, Any]) -> dict[str, str]:
    found = optional(given, "metadata", dict, "an object") or {}
    if not is_metadata(found):
        raise wrong("metadata", f"expected {METADATA}")
    return found


def _label(given: Mapping[str, Any], name: str) -> str | None:
    found = optional(given, name, str, "a string")
    if found is not None and len(found) > _MAX_NAME:
        raise wrong(name, f"expected at most {_MAX_NAME} characters, got {len(found)}")
    return found or None


def _all_strings(values: Sequence[Any]) -> bool:
    return all(isinstance(one, str) for one in values)
