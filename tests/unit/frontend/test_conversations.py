"""Conversations as templates take them, and what of tools is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commutator.contract.conversation import (
    Conversation,
    Media,
    Message,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from commutator.contract.parser import AnswerParser, Parser
from commutator.errors import RequestError
from commutator.frontend.request.conversation import (
    characters_of,
    check_tools,
    messages_of,
)
from commutator.tokenizer.text_model import ChatTemplate

OBJECTS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}"
)
TEXTS = OBJECTS.replace(" | tojson", " + ''")
NOTHING = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALLED = Message(role="assistant", content=[ToolCall(id="1", name="add", arguments='{"a": "é"}')])
ANSWERED = Message(role="tool", content=[ToolResult(call_id="1", parts=[Text("4"), Text("2")])])
USER = Message(role="user", content="Hi")
TOOLS = [Tool(name="add")]


class Reading(Parser):
    """A parser that reads calls, or none."""

    def __init__(self, reads_calls: bool) -> None:
        self.reads_calls = reads_calls

    def answer(self, conversation: Conversation | None, prompt_end: str) -> AnswerParser | None:
        return None


@pytest.mark.parametrize(
    ("source", "arguments"), [(OBJECTS, {"a": "é"}), (TEXTS, '{"a": "é"}')], ids=["object", "text"]
)
def test_arguments_are_what_the_template_wants(source: str, arguments: Any) -> None:
    template = ChatTemplate(source, {})
    (message,) = messages_of([CALLED], template)
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": arguments}
    assert 'add{"a": "é"}' in template.render([message])


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_arguments_that_nest_too_deeply_stay_text(depth: int) -> None:
    """Whoever wrote them: a conversation may have begun elsewhere."""
    arguments = '{"a":' * depth + "1" + "}" * depth
    called = ToolCall(id="1", name="add", arguments=arguments)
    template = ChatTemplate(OBJECTS, {})
    (message,) = messages_of([Message(role="assistant", content=[called])], template)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_template_that_asks_whether_there_is_text_gets_none() -> None:
    source = OBJECTS.replace("{{ m.content }}", "{{ m.content if m.content is not none }}")
    calls = "(m.tool_calls if m.content is none else [])"
    source = source.replace("m.tool_calls or []", calls)
    (message,) = messages_of([CALLED], ChatTemplate(source, {}))
    assert message["content"] is None


def test_ids_of_other_models_are_short_where_the_template_takes_no_others() -> None:
    source = OBJECTS.replace(
        "{{ c.function.name }}",
        "{% if c.id | length != 9 %}{{ raise_exception('no') }}{% endif %}{{ c.id }}"
        "{{ c.function.name }}",
    )
    template = ChatTemplate(source, {})
    called, answered = messages_of([CALLED, ANSWERED], template)
    short = called["tool_calls"][0]["id"]
    assert short.isalnum()
    assert answered["tool_call_id"] == short
    assert short in template.render([called, answered])
    for call_id, kept in (("abcdef012", True), ("abcdef-12", False), ("2", False)):
        call = ToolCall(id=call_id, name="add", arguments="{}")
        (message,) = messages_of([Message(role="assistant", content=[call])], template)
        (made,) = message["tool_calls"]
        assert (made["id"] == call_id) is kept
        assert made["id"] != short
    (called,) = messages_of([CALLED], ChatTemplate(OBJECTS, {}))
    assert called["tool_calls"][0]["id"] == "1"


def test_results_have_the_names_of_their_calls() -> None:
    _, message = messages_of([CALLED, ANSWERED], None)
    assert message == {"role": "tool", "content": "4\n2", "tool_call_id": "1", "name": "add"}


def test_thoughts_have_all_the_names_that_templates_know() -> None:
    thinking = Message(role="assistant", content=[Reasoning("hm"), Text("Yes")])
    (message,) = messages_of([thinking], None)
    assert message["content"] == "Yes"
    assert {message[name] for name in ("reasoning", "reasoning_content", "thinking")} == {"hm"}


def test_pictures_are_refused() -> None:
    with pytest.raises(RequestError, match="image is not served"):
        messages_of([Message(role="user", content=[Media(kind="image")])], None)


@pytest.mark.parametrize(
    ("content", "least"),
    [
        ("x" * 70, 70),
        ([Text("x" * 40), Reasoning("x" * 30)], 70),
        ([ToolCall(id="1", name="a", arguments="x" * 70)], 70),
        ([ToolResult(call_id="1", parts=[Text("x" * 40), Text("x" * 30)])], 70),
        ([Media(kind="image"), Text("x" * 70)], 70),  # refused when it is rendered
    ],
)
def test_the_time_of_rendering_is_told_by_all_texts(content: Any, least: int) -> None:
    characters = characters_of(Message(role="user", content=content))
    assert least <= characters <= least + 300


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    (tool,) = (tool.described for tool in TOOLS)
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "filtered",
    ["tojson", "tojson(indent=0)", "tojson(ensure_ascii=True)", "tojson(sort_keys=True)"],
)
@pytest.mark.parametrize("what", ["tool", "tool.function", "tool.function.parameters"])
def test_tools_are_written_the_same_each_time(filtered: str, what: str) -> None:
    schema = {"type": "object", "properties": {"é": {"enum": [1, None, "<a>"]}}}
    tools = [Tool(name="z", description="é", parameters=schema).described]
    template = ChatTemplate(
        f"{{% for tool in tools %}}{{{{ {what} | {filtered} }}}}{{% endfor %}}", {}
    )
    plain = json.loads(json.dumps(tools))
    expected, first, again = (
        template.render([], variables={"tools": one}) for one in (plain, tools, tools)
    )
    assert first == again == expected


@pytest.mark.parametrize(
    ("source", "reads", "choice", "param", "words"),
    [
        (NOTHING, True, ToolChoice(mode="required"), "tools", "chat_template"),
        (OBJECTS, False, ToolChoice(mode="named", name="add"), "tools", "tool_parser"),
        (NOTHING, True, None, "tools", "chat_template"),
        (OBJECTS, False, None, "tools", "tool_parser"),
        (OBJECTS, None, None, "tools", "pip install commutator-parsers"),
    ],
)
def test_what_is_refused(
    source: str, reads: bool | None, choice: ToolChoice | None, param: str, words: str
) -> None:
    conversation = Conversation(messages=[USER], tools=TOOLS, tool_choice=choice)
    parser = None if reads is None else Reading(reads)
    with pytest.raises(RequestError, match=words) as refused:
        check_tools(conversation, ChatTemplate(source, {}), parser)
    assert refused.value.param == param


@pytest.mark.parametrize("mode", ["required", "named"])
def test_a_parser_that_cannot_force_calls_says_so(mode: Any) -> None:
    conversation = Conversation(
        messages=[USER], tools=TOOLS, tool_choice=ToolChoice(mode=mode, name="add")
    )
    with pytest.raises(RequestError, match="cannot make it call") as refused:
        Reading(True).forced(conversation, "")
    assert (refused.value.param, refused.value.code) == ("tool_choice", "unsupported_parameter")


def test_a_history_with_calls_needs_a_template_that_knows_them() -> None:
    conversation = Conversation(messages=[USER, CALLED, ANSWERED])
    with pytest.raises(RequestError, match="does not write tools") as refused:
        check_tools(conversation, ChatTemplate(NOTHING, {}), None)
    assert refused.value.param == "messages"
    check_tools(conversation, ChatTemplate(OBJECTS, {}), None)


def test_no_parser_is_needed_where_no_tool_may_be_called() -> None:
    none = ToolChoice(mode="none")
    conversation = Conversation(messages=[USER], tools=TOOLS, tool_choice=none)
    check_tools(conversation, ChatTemplate(NOTHING, {}), None)
