"""Errors of what all protocols share name fields as the client's protocol calls them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.front_door import MODEL, FakeDispatcher, front_door

from commutator.contract.response_store import ResponseStoreConfig
from commutator.errors import RequestError
from commutator_anthropic.protocol import AnthropicConfig
from commutator_openai.protocol import OpenAiConfig
from commutator_responses.protocol import ResponsesConfig

PROTOCOLS = (
    OpenAiConfig(kind="openai"),
    AnthropicConfig(kind="anthropic"),
    ResponsesConfig(kind="responses", store=ResponseStoreConfig(kind="none")),
)
LONG = "word " * 60
SAID = [{"role": "user", "content": "Hi"}]
LONG_SAID = [{"role": "user", "content": LONG}]
SCHEMA = {"type": "json_schema", "schema": {"enum": ["x" * 131_072]}}
NAMED = {"name": "s", "schema": SCHEMA["schema"]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
CALLED = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": LONG_SAID}, "messages"),
        ("responses", {"input": LONG}, "input"),
        ("responses", {"input": LONG, "truncation": "auto"}, "input"),
        ("responses/input_tokens", {"input": [{"type": "function_call", "call_id": "c",
          "name": "f", "arguments": "{}"}]}, "input"),
        ("responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
        ("completions", {"prompt": LONG}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 51}, "max_tokens"),
        ("chat/completions", {"messages": CALLED}, "messages"),
        ("chat/completions", {"messages": SAID, "response_format":
          {"type": "json_schema", "json_schema": NAMED}}, "response_format"),
        ("responses", {"input": "Hi", "text": {"format": {**SCHEMA, "name": "s"}}}, "text.format"),
        ("chat/completions", {"messages": SAID, "stop": ["x" * 513]}, "stop"),
    ],
)  # fmt: skip
async def test_the_field_is_the_client_s(path: str, fields: dict[str, Any], param: str) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, protocols=PROTOCOLS) as door:
        dispatcher.longest = 50
        async with door.session.post(f"{door.url}/v1/{path}", json={"model": MODEL, **fields}) as a:
            error = (await a.json())["error"]
    assert (a.status, error["param"]) == (400, param)
    begins = re.match(r"([a-z._]+):", error["message"])
    assert begins is None or begins[1] == param


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"output_config": {"format": SCHEMA}}, "output_config.format: what the answer follows"),
        ({"stop_sequences": ["x" * 513]}, "stop_sequences: expected strings"),
    ],
)
async def test_messages_tells_fields_in_its_texts(fields: dict[str, Any], beginning: str) -> None:
    async with front_door(FakeDispatcher(), protocols=PROTOCOLS) as door:
        body = {"model": MODEL, "messages": SAID, "max_tokens": 8, **fields}
        async with door.session.post(f"{door.url}/v1/messages", json=body) as answer:
            error = (await answer.json())["error"]
    assert answer.status == 400
    assert error["message"].startswith(beginning)


def test_only_the_beginning_that_names_a_field_is_changed() -> None:
    error = RequestError("stop: expected strings, as stop: says", "stop")
    error.rename({"stop": "stop_sequences", "max_tokens": "max"})
    assert (str(error), error.param) == ("stop_sequences: expected strings, as stop: says",
                                         "stop_sequences")  # fmt: skip
    error.rename({"stop": "other"})
    assert error.param == "stop_sequences"
    unnamed = RequestError("wrong")
    unnamed.rename({"": "x", "stop": "y"})
    assert (str(unnamed), unnamed.param) == ("wrong", None)
