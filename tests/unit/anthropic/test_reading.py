"""What Anthropic's clients send becomes what core asks."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.conversation import Generate, Media, Message, Text, ToolCall, ToolResult
from commutator.contract.request import Constraint, KvRetention
from commutator.errors import RequestError
from commutator_anthropic.reading import Asked, read_request

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "F.", "input_schema": {"type": "object"}}


def read(server_tools: Any = "leave_out", **fields: Any) -> Asked:
    body = {"model": "m", "max_tokens": 8, "messages": [USER], **fields}
    return read_request(body, server_tools=server_tools)


def messages(**fields: Any) -> list[Message]:
    conversation = read(**fields).generate.conversation
    assert conversation is not None
    return [*conversation.messages]


def test_the_fields_of_sampling() -> None:
    asked = read(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], stream=True)
    asked.generate.conversation = None
    assert asked.ignored == []
    assert asked.generate == Generate(
        model="m", stream=True, max_tokens=8, temperature=0.5, top_p=0.9, top_k=3, stop=("x",),
        params={
            "prompt": "messages", "stop": "stop_sequences",
            "response_format": "output_config.format",
            "retention": "cache_control",
        },
    )  # fmt: skip


def test_nulls_and_unknown_fields_ask_for_nothing_and_the_second_are_named() -> None:
    asked = read(temperature=None, tools=None, thinking=None, speed="fast", newest={"a": 1})
    assert asked.ignored == ["newest", "speed"]
    assert asked.generate.temperature is None


def test_a_conversation_with_a_call_and_its_result() -> None:
    said = messages(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            USER,
            {"role": "system", "content": "Now in the middle."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, "é"]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [
                            {"type": "text", "text": "found"},
                            {"type": "image", "source": {"type": "url", "url": "http://a/b"}},
                        ],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )
    mark = KvRetention(priority=1, ttl_s=300.0)
    assert said[0] == Message(role="system", content="Be brief.\nBe kind.", retention=mark)
    assert said[2] == Message(role="system", content="Now in the middle.")
    call = said[3].content[-1]
    assert isinstance(call, ToolCall)
    assert (call.id, call.name, json.loads(call.arguments)) == ("t1", "f", {"a": [1, "é"]})
    assert [one.role for one in said] == ["system", "user", "system", "assistant", "tool", "user"]
    assert said[4].content == [ToolResult(call_id="t1", parts=[Text("found")])]
    assert said[5].content == [Media(kind="image", url="http://a/b"), Text("And now?")]


def test_tools_of_the_apis_servers_are_left_out_or_refused() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    asked = read(tools=[TOOL, web], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    conversation = asked.generate.conversation
    assert conversation is not None
    assert [tool.name for tool in conversation.tools] == ["f"]
    assert asked.ignored == ["tools"]
    choice = conversation.tool_choice
    assert choice is not None
    assert (choice.mode, choice.parallel) == ("required", False)
    with pytest.raises(RequestError, match=r"tools\.1\.type.*only custom tools"):
        read("refuse", tools=[TOOL, web])


def test_the_session_is_that_of_claude_code() -> None:
    user = json.dumps({"device_id": "d", "session_id": "s-1"})
    asked = read(metadata={"user_id": user})
    assert asked.generate.session_id == "s-1"
    assert read(metadata={"user_id": "{not JSON"}).generate.session_id is None


def test_how_to_think_is_for_the_template() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = read(thinking=thinking, output_config={"effort": "high"})
    assert asked.generate.conversation is not None
    assert asked.generate.conversation.variables == {
        "enable_thinking": True, "thinking": True, "reasoning_effort": "high",
    }  # fmt: skip
    assert asked.ignored == ["thinking.budget_tokens"]


def test_a_format_is_a_constraint() -> None:
    described = {"type": "json_schema", "schema": {"type": "object"}}
    asked = read(output_config={"format": described})
    assert asked.generate.constraint == Constraint(kind="json_schema", value='{"type":"object"}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{**USER, "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
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
    *("model", "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "metadata"),
    *("stop_sequences", "temperature", "top_p", "top_k", "output_config", "stream"),
]


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON))
def test_whatever_a_field_holds_is_read_or_refused(fields: dict[str, Any]) -> None:
    with suppress(RequestError):
        assert read(**fields).generate.conversation is not None


OF_SERVERS = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
]


def test_what_the_apis_servers_ran_is_left_out_and_named_or_refused() -> None:
    talk = [USER, {"role": "assistant", "content": [*OF_SERVERS, {"type": "text", "text": "A."}]}]
    asked = read(messages=talk)
    assert asked.ignored == ["messages.1.content.0", "messages.1.content.1"]
    assert messages(messages=talk)[1] == Message(role="assistant", content="A.")
    with pytest.raises(RequestError) as caught:
        read("refuse", messages=talk)
    assert caught.value.param == "messages.1.content.0"
    with pytest.raises(RequestError):
        read(messages=[{"role": "user", "content": OF_SERVERS}])


def test_what_a_search_found_is_text() -> None:
    found = {"type": "search_result", "title": "T", "source": "S",
             "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}  # fmt: skip
    (said,) = messages(messages=[{"role": "user", "content": [found]}])
    assert said.content == "T\nS\na\nb"
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
    (said,) = messages(messages=[{"role": "user", "content": [result]}])
    assert said.content == [ToolResult(call_id="1", parts=[Text("T\nS\na\nb")])]
    with pytest.raises(RequestError) as caught:
        read(messages=[{"role": "user", "content": [{**found, "source": None}]}])
    assert caught.value.param == "messages.0.content.0.source"


@pytest.mark.parametrize("name", ["a b", "", "x" * 129, "é"])
def test_names_of_tools_are_checked(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(tools=[{**TOOL, "name": name}])
    assert caught.value.param == "tools.0.name"
