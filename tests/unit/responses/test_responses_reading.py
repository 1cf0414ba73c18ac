"""What clients of the Responses API send becomes what core asks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.conversation import (
    Generate,
    Media,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_responses.items import input_items, messages_of, with_ids
from commutator_responses.reading import Asked, read_request

TOOL = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
WEB = {"type": "web_search"}


def read(server_tools: Any = "leave_out", **fields: Any) -> Asked:
    body = {"model": "m", "input": "Hi", **fields}
    return read_request(body, input_items(body["input"]), server_tools=server_tools)


def messages(*items: Any, **fields: Any) -> list[Message]:
    conversation = read(input=[*items], **fields).generate.conversation
    assert conversation is not None
    return [*conversation.messages]


def test_the_fields_of_sampling() -> None:
    asked = read(
        temperature=0.5, top_p=0.9, top_k=3, seed=7, stop="x", stream=True, max_output_tokens=8,
        ignore_eos=True, prompt_cache_key="s", safety_identifier="u", top_logprobs=2,
    )  # fmt: skip
    asked.generate.conversation = None
    asked.generate.params = {}
    assert asked.ignored == []
    assert asked.generate == Generate(
        model="m", stream=True, max_tokens=8, temperature=0.5, top_p=0.9, top_k=3, seed=7,
        stop=("x",), ignore_eos=True, session_id="s", user="u", top_logprobs=2,
    )  # fmt: skip


def test_nulls_and_unknown_fields_ask_for_nothing_and_the_second_are_named() -> None:
    asked = read(
        temperature=None, tools=None, background=False, conversation=None, newest={"a": 1},
        service_tier="auto", include=["file_search_call.results"],
    )  # fmt: skip
    assert asked.ignored == ["include", "newest"]
    assert read(service_tier="flex").ignored == ["service_tier"]


def test_an_agents_turn_is_one_message() -> None:
    said = messages(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []},
        ]},
        CALL,
        {**CALL, "call_id": "c2", "namespace": "files"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "sh", "input": 'ls "x"'},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://b"},
        ]},
        {"type": "reasoning", "summary": [], "encrypted_content": "secret"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        instructions="You are kind.",
    )  # fmt: skip
    assert said == [
        Message(role="system", content="You are kind."),
        Message(role="developer", content="Be brief."),
        Message(role="user", content="Look."),
        Message(role="assistant", content=[
            Reasoning("Hm"),
            Text("I look."),
            ToolCall(id="c1", name="f", arguments="{}"),
            ToolCall(id="c2", name="files__f", arguments="{}"),
            ToolCall(id="c3", name="sh", arguments='{"input":"ls \\"x\\""}'),
        ]),
        Message(role="tool", content=[ToolResult(call_id="c1", parts=[Text("found")])]),
        Message(role="tool", content=[
            ToolResult(call_id="c3", parts=[Text("a"), Media(kind="image", url="http://b")]),
        ]),
        Message(role="assistant", content="Done."),
        Message(role="assistant", content="Really."),
    ]  # fmt: skip


def test_tools_of_openais_servers_are_left_out_or_refused() -> None:
    asked = read(tools=[TOOL, WEB], tool_choice=WEB, input=[{"role": "user", "content": "Hi"}, {
        "type": "web_search_call", "id": "ws_1", "status": "completed",
    }])  # fmt: skip
    assert [tool.name for tool in asked.toolbox.tools] == ["f"]
    assert asked.ignored == ["input.1", "tool_choice", "tools"]
    assert [tool["type"] for tool in asked.echo["tools"]] == ["function"]
    with pytest.raises(RequestError, match=r"tools\.1\.type"):
        read("refuse", tools=[TOOL, WEB])


@pytest.mark.parametrize(
    ("fields", "choice", "tools"),
    [
        ({}, None, ["f", "sh", "files__f"]),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False), ["f", "sh", "files__f"]),
        ({"tool_choice": "none"}, ToolChoice(mode="none"), ["f", "sh", "files__f"]),
        ({"tool_choice": "required"}, ToolChoice(mode="required"), ["f", "sh", "files__f"]),
        (
            {"tool_choice": {"type": "function", "name": "f", "namespace": "files"}},
            ToolChoice(mode="named", name="files__f"),
            ["f", "sh", "files__f"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "custom", "name": "sh"},
            ]}},
            ToolChoice(mode="required"),
            ["sh"],
        ),
    ],
)  # fmt: skip
def test_which_tools_are_to_be_called(
    fields: dict[str, Any], choice: ToolChoice | None, tools: list[str]
) -> None:
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": [TOOL]}
    asked = read(tools=[TOOL, {"type": "custom", "name": "sh"}, space], **fields)
    conversation = asked.generate.conversation
    assert conversation is not None
    assert conversation.tool_choice == choice
    assert [tool.name for tool in conversation.tools] == tools


def test_how_to_think_is_for_the_template() -> None:
    asked = read(reasoning={"effort": "none", "summary": "auto"}, text={"verbosity": "low"})
    assert asked.generate.conversation is not None
    assert asked.generate.conversation.variables == {
        "enable_thinking": False, "thinking": False, "reasoning_effort": "none",
    }  # fmt: skip
    assert asked.ignored == ["reasoning.summary", "text.verbosity"]


def test_an_effort_asks_a_model_to_think() -> None:
    conversation = read(reasoning={"effort": "low"}).generate.conversation
    assert conversation is not None
    assert conversation.variables == {
        "enable_thinking": True, "thinking": True, "reasoning_effort": "low",
    }  # fmt: skip


def test_what_the_text_follows() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    asked = read(text={"format": form})
    assert asked.generate.constraint == Constraint(kind="json_schema", value='{"type":"object"}')
    assert asked.echo["text"]["format"] == form
    asked = read(text={"format": {"type": "json_object"}})
    assert asked.generate.constraint == Constraint(kind="json_object")
    assert read(text={"format": {"type": "text"}}).generate.constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input.0"),
        ({"input": [{"text": "x"}]}, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input.0.content.0.file_id"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]},
         "input.0.encrypted_content"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"background": "yes"}, "background"),
        ({"include": ["everything"]}, "include.0"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"store": "no"}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"stop": [1]}, "stop"),
        ({"user": "u" * 300}, "user"),
        ({"tools": [TOOL, TOOL]}, "tools.1"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "", "tools": [TOOL]}]}, "tools.0.name"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
         "tools.0.format.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}:")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
)
_FIELDS = [
    *("background", "conversation", "frequency_penalty", "ignore_eos", "include", "input"),
    *("instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls", "prompt"),
    *("previous_response_id", "reasoning", "stop", "store", "stream", "stream_options", "text"),
    *("temperature", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
]


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON))
def test_whatever_a_field_holds_is_read_or_refused(fields: dict[str, Any]) -> None:
    with suppress(RequestError):
        assert read(**fields).generate.conversation is not None


_TYPES = st.sampled_from([
    *("message", "function_call", "function_call_output", "custom_tool_call", "reasoning"),
    *("custom_tool_call_output", "web_search_call", "item_reference", "?"),
])  # fmt: skip
_PART = st.fixed_dictionaries({
    "type": st.sampled_from(["input_text", "output_text", "input_image", "refusal", "input_file"])
}, optional={"text": st.text(max_size=3), "image_url": st.text(max_size=3)})  # fmt: skip
_CONTENT = st.text(max_size=3) | st.lists(_PART, max_size=2) | _JSON
_ITEM = st.fixed_dictionaries({"type": _TYPES}, optional={
    "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
    "content": _CONTENT, "output": _CONTENT, "summary": _CONTENT, "call_id": st.text(max_size=3),
    "name": st.text(max_size=3), "arguments": st.text(max_size=3), "input": st.text(max_size=3),
})  # fmt: skip


@given(st.lists(_ITEM, max_size=4))
def test_what_is_kept_of_items_says_the_same(given_items: list[dict[str, Any]]) -> None:
    items = input_items(given_items)
    try:
        said = messages_of(items, "leave_out", [])
    except RequestError:
        return
    kept = with_ids(items, "k")
    assert messages_of(kept, "leave_out", []) == said
    assert with_ids(kept, "other") == kept
