"""What only the engine does reaches a real SGLang as it came; its answer comes back unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tests.support.launched_servers import wait_for_workers
from tests.support.sglang_server import MODEL as SERVED
from tests.support.sglang_server import SglangServer, running_sglang

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.sglang, pytest.mark.long]

MODEL = "another-name"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in the capital of Italy?"}],
    "temperature": 0,
    "max_tokens": 60,
}
BY_SCHEMA = {
    **ASKED,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": PLACE, "strict": True},
    },
}
BY_TOOL = {
    **ASKED,
    "tools": [
        {
            "type": "function",
            "function": {"name": "get_weather", "parameters": PLACE, "strict": True},
        }
    ],
    "tool_choice": "required",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with running_sglang(tmp_path_factory.mktemp("own"), "--tool-call-parser=qwen") as running:
        yield running


@pytest.fixture(scope="module")
def cluster(server: SglangServer) -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": MODEL, "source": SERVED.source}],
        "engines": [{"kind": "sglang", "url": server.url}],
        "runtime": {"lease_s": 300},  # a busy machine makes it no lost worker
    }
    with LocalCluster(config, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


@pytest.fixture
def direct(server: SglangServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.proves("sglang", "JSON schemas and tool calls", how="real engine on CPU")
def test_an_answer_by_a_json_schema(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    ours = client.chat.completions.create(model=MODEL, **BY_SCHEMA)
    theirs = direct.chat.completions.create(model=SERVED.name, **BY_SCHEMA)
    said = ours.choices[0].message.content or ""
    assert json.loads(said)["city"] in {"Paris", "Rome"}
    assert said == theirs.choices[0].message.content
    chunks = client.chat.completions.create(model=MODEL, stream=True, **BY_SCHEMA)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said


@pytest.mark.proves("sglang", "JSON schemas and tool calls", how="real engine on CPU")
def test_a_tool_call(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    said = []
    for asked, model in ((client, MODEL), (direct, SERVED.name)):
        choice = asked.chat.completions.create(model=model, **BY_TOOL).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert calls is not None
        (call,) = calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        said.append((call.function.name, json.loads(call.function.arguments)))
    assert said[0] == said[1]
    assert said[0][0] == "get_weather"
    assert said[0][1]["city"] in {"Paris", "Rome"}
    chunks = client.chat.completions.create(model=MODEL, stream=True, **BY_TOOL)
    pieces = [
        piece.function
        for chunk in chunks
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
        if piece.function is not None
    ]
    assert "".join(piece.name or "" for piece in pieces) == "get_weather"
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == said[0][1]


def test_scores(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    """An endpoint that the front door has no answer of its own for."""
    asked = {"query": "The capital of France is", "items": [" Paris"], "label_token_ids": [1, 2]}
    told = [
        one.post("/score", body={**asked, "model": model}, cast_to=object)
        for one, model in ((client, MODEL), (direct, SERVED.name))
    ]
    print(told)
    assert told[0]["scores"] == told[1]["scores"]  # type: ignore[index]


def test_refusals_have_the_words_of_the_server(
    client: openai.OpenAI, direct: openai.OpenAI
) -> None:
    told = []
    for one, model in ((client, MODEL), (direct, SERVED.name)):
        with pytest.raises(openai.APIStatusError) as caught:
            one.embeddings.create(model=model, input="The capital of France")
        told.append((caught.value.status_code, caught.value.message))
    print(told)
    assert told[0] == told[1]
