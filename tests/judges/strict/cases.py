"""What OpenAI's and Anthropic's own clients read, while they check every field: one engine's cases.

`test_strict_clients.py` runs this file once for each engine and each generation of the clients.
STRICT_URL is the deployment's address; its model is the trained one of the family hermes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from openresponses_types import ResponseResource
from tests.judges.trained.clients import (
    APIS,
    messages_fields,
    responses_fields,
    with_ids,
)
from tests.support.trained_scripts import FAMILIES, Said, turns

URL = os.environ["STRICT_URL"]
VERSIONS = os.environ["STRICT_VERSIONS"]
MODEL = "m"
TURNS = {turn.name: turn for turn in turns(FAMILIES["hermes"])}
CALL, TEXT = TURNS["call"], TURNS["text"]
AT_ONCE = 8


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{URL}/v1", api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=URL, api_key="-", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_the_clients_are_those_that_were_meant() -> None:
    assert f"openai {openai.__version__}, anthropic {anthropic.__version__}" == VERSIONS


# ------------------------------------------------------------------ every API


@pytest.mark.parametrize("api", APIS)
def test_answers_are_those_of_the_script(api: str) -> None:
    """Text, reasoning, calls and answers by a schema, whole and streamed."""
    asked = [(turn, how) for turn in TURNS.values() for how in (False, True)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [*pool.map(lambda one: APIS[api](URL, MODEL, one[0], streamed=one[1]), asked)]
    usage: dict[str, tuple[int, int]] = {}
    for (turn, streamed), answer in zip(asked, answers, strict=True):
        assert answer.said == turn.said, (turn.name, streamed)
        assert answer.usage == usage.setdefault(turn.name, answer.usage), (turn.name, streamed)
        assert len({*answer.ids}) == len(turn.said.calls), (turn.name, streamed)


@pytest.mark.parametrize("api", APIS)
def test_a_conversation_goes_on_with_the_ids_that_it_was_given(api: str) -> None:
    ids: dict[str, str] = {}
    for name in ("call", "result", "two results"):
        turn = TURNS[name]
        answer = APIS[api](URL, MODEL, with_ids(turn, ids), streamed=True)
        assert answer.said == turn.said, name
        following = TURNS["two results"].messages[len(turn.messages) :]
        written = [call["id"] for call in following[0].get("tool_calls", [])] if following else []
        ids |= zip(written, answer.ids, strict=False)
    assert len(ids) == len({*ids.values()}) == 3


HI: Any = [{"role": "user", "content": "Hi"}]
LONG: Any = [{"role": "user", "content": "word " * 5000}]
"""No model here has room for it."""


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_chat(streamed: bool, client: openai.OpenAI) -> None:
    ask: Any = partial(client.chat.completions.create, stream=streamed)
    _check_errors(
        lambda: ask(model="nothing", messages=HI),
        lambda: ask(model=MODEL, messages=HI, temperature=9),
        "temperature",
        lambda: ask(model=MODEL, messages=LONG),
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_responses(streamed: bool, client: openai.OpenAI) -> None:
    ask: Any = partial(client.responses.create, stream=streamed)
    _check_errors(
        lambda: ask(model="nothing", input=HI),
        lambda: ask(model=MODEL, input=HI, max_output_tokens=0),
        "max_output_tokens",
        lambda: ask(model=MODEL, input=LONG),
    )


def _check_errors(
    unknown: Callable[[], object],
    wrong: Callable[[], object],
    parameter: str,
    too_long: Callable[[], object],
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        unknown()
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        wrong()
    assert refused.value.param == parameter
    with pytest.raises(openai.BadRequestError) as longer:
        too_long()
    assert longer.value.code == "context_length_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_messages(streamed: bool, other: anthropic.Anthropic) -> None:
    ask: Any = partial(other.messages.create, stream=streamed)
    for error, kind, fields in (
        (anthropic.NotFoundError, "not_found_error", {"model": "nothing", "messages": HI}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": HI, "max_tokens": 0}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": LONG}),
    ):
        with pytest.raises(error) as caught:
            ask(**{"model": MODEL, "max_tokens": 9, **fields})
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)


def test_models_are_listed(client: openai.OpenAI, other: anthropic.Anthropic) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert MODEL in [model.id for model in other.models.list()]
    assert client.models.retrieve(MODEL).object == "model"
    assert other.models.retrieve(MODEL).type == "model"


# ------------------------------------------- ids of a stream and of what it ends with


def test_chunks_of_a_chat_have_one_id(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CALL.messages, "tools": CALL.tools}
    with client.chat.completions.stream(**fields, temperature=0) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    assert {chunk.id for chunk in chunks} == {final.id}
    assert len({chunk.created for chunk in chunks}) == 1
    deltas = [
        call for chunk in chunks for one in chunk.choices for call in one.delta.tool_calls or ()
    ]
    told = [call.id for call in deltas if call.id]
    assert told == [call.id for call in final.choices[0].message.tool_calls or ()]
    assert len(told) == len(CALL.said.calls)


def test_a_streamed_response_has_the_ids_of_the_final_one(client: openai.OpenAI) -> None:
    final, events = _streamed(client, **{**responses_fields(MODEL, CALL), "store": True})
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "message", *("function_call" for _ in CALL.said.calls)]
    assert len({item.id for item in final.output}) == len(final.output)
    items: dict[int, Sequence[Any]] = {}
    for event in events:
        if (response := getattr(event, "response", None)) is not None:
            assert response.id == final.id
        if (item := getattr(event, "item", None)) is not None:
            wanted = final.output[event.output_index]
            assert (item.id, getattr(item, "call_id", None)) == (
                wanted.id,
                getattr(wanted, "call_id", None),
            )
            items[event.output_index] = (*items.get(event.output_index, ()), event.type)
        if (item_id := getattr(event, "item_id", None)) is not None:
            assert item_id == final.output[event.output_index].id
    each = ("response.output_item.added", "response.output_item.done")
    assert items == dict.fromkeys(range(len(final.output)), each)
    assert client.responses.retrieve(final.id).to_dict() == final.to_dict()


def test_a_streamed_message_has_the_ids_of_the_final_one(other: anthropic.Anthropic) -> None:
    with other.messages.stream(**messages_fields(MODEL, CALL)) as stream:
        events: Any = [*stream]
        final: Any = stream.get_final_message()
    (start,) = [event.message for event in events if event.type == "message_start"]
    assert start.id == final.id
    begun = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in begun] == [*range(len(final.content))]
    for event, block in zip(begun, final.content, strict=True):
        assert event.content_block.type == block.type
        assert getattr(event.content_block, "id", None) == getattr(block, "id", None)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    fields = messages_fields(MODEL, CALL)
    asked = {name: fields[name] for name in ("model", "messages", "tools")}
    counted = other.messages.count_tokens(**asked).input_tokens
    assert counted == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


# ------------------------------------------------- the seven cases of Open Responses


def test_basic_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(**responses_fields(MODEL, TEXT))
    _check(answer, TEXT.said)


def test_streaming_response(client: openai.OpenAI) -> None:
    final, events = _streamed(client, **responses_fields(MODEL, TEXT))
    _check(final, TEXT.said)
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == final.output_text
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]


def test_system_prompt(client: openai.OpenAI) -> None:
    """Said either way, it is the same prompt."""
    common: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "store": False}
    system: Any = {"role": "system", "content": "You are a pirate."}
    user: Any = {"role": "user", "content": "Hi"}
    one = client.responses.create(input=[system, user], **common)
    two = client.responses.create(input="Hi", instructions="You are a pirate.", **common)
    plain = client.responses.create(input="Hi", **common)
    for answer in (one, two, plain):
        assert answer.status in ("completed", "incomplete")
        ResponseResource.model_validate(answer.to_dict(mode="json"))
    assert [item.to_dict().get("content") for item in one.output] == [
        item.to_dict().get("content") for item in two.output
    ]
    assert one.usage is not None
    assert two.usage is not None
    assert plain.usage is not None
    assert one.usage.input_tokens == two.usage.input_tokens > plain.usage.input_tokens


def test_tool_calling(client: openai.OpenAI) -> None:
    _check(client.responses.create(**responses_fields(MODEL, CALL)), CALL.said)


def test_tool_calling_streaming(client: openai.OpenAI) -> None:
    final, events = _streamed(client, **responses_fields(MODEL, CALL))
    _check(final, CALL.said)
    (done,) = [one for one in events if one.type == "response.function_call_arguments.done"]
    written = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(written) == done.arguments == final.output[-1].arguments


def test_image_input(client: openai.OpenAI) -> None:
    """The model sees nothing, which is said."""
    image = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{DOT}"}
    text = {"type": "input_text", "text": "What is this?"}
    asked: Any = [{"role": "user", "content": [text, image]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=asked, max_output_tokens=8)
    assert "image" in str(caught.value)


DOT = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def test_multi_turn(client: openai.OpenAI) -> None:
    """By the id of the last response, as with the whole conversation."""
    first = client.responses.create(**{**responses_fields(MODEL, CALL), "store": True})
    _check(first, CALL.said)
    rest = TURNS["result"].messages[len(CALL.messages) + 1 :]
    whole = TURNS["result"]
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results = [message["content"] for message in rest if message["role"] == "tool"]
    said: Any = [
        {"type": "function_call_output", "call_id": one, "output": result}
        for one, result in zip(calls, results, strict=True)
    ]
    said += [message for message in rest if message["role"] != "tool"]
    fields = {**responses_fields(MODEL, whole), "input": said, "store": True}
    second = client.responses.create(**fields, previous_response_id=first.id)
    _check(second, whole.said)
    assert second.previous_response_id == first.id


def _streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """The final response, and all events."""
    events: list[Any] = [*client.responses.create(**{**fields, "stream": True})]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].type == "response.completed"
    return events[-1].response, events


def _check(answer: Any, said: Said) -> None:
    assert answer.status == "completed"
    assert (answer.output_text or None) == said.content
    thoughts = [item.content[0].text for item in answer.output if item.type == "reasoning"]
    assert thoughts == ([] if said.reasoning is None else [said.reasoning])
    called = [item.name for item in answer.output if item.type == "function_call"]
    assert called == [name for name, _ in said.calls]
    ResponseResource.model_validate(answer.to_dict(mode="json"))
