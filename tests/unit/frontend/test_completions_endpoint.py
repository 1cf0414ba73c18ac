"""POST /v1/completions in the shapes of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, FrontDoor, answer, front_door

from commutator.contract.request import FinishReason
from commutator.routing.prefix_index.hashing import sequence_hashes


async def stream(door: FrontDoor, **body: Any) -> list[Any]:
    payload = {"model": MODEL, "prompt": "Hi", "stream": True} | body
    async with door.session.post(f"{door.url}/v1/completions", json=payload) as response:
        assert response.status == 200
        lines = (await response.text()).strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_whole_answer() -> None:
    async with front_door(FakeDispatcher(answer(" Paris."))) as door:
        status, body = await door.complete(prompt="The capital of France is")
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [
        {
            "index": 0,
            "text": " Paris.",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 5


async def test_max_tokens_is_16_unless_given() -> None:
    dispatcher = FakeDispatcher(answer("x " * 40))
    async with front_door(dispatcher) as door:
        _, body = await door.complete()
        await door.complete(max_tokens=3)
        dispatcher.longest = 10
        await door.complete(prompt="a b c d")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16
    assert [r.sampling.max_tokens for r in dispatcher.requests] == [16, 3, 6]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi there", [TEXT.encode("Hi there")]),
        (["Hi", "You"], [TEXT.encode("Hi"), TEXT.encode("You")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.complete(prompt=prompt)
    assert status == 200
    assert [list(request.token_ids) for request in dispatcher.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_several_prompts_with_several_answers() -> None:
    dispatcher = FakeDispatcher(lambda request: answer(f"{len(request.token_ids)}")(request))
    async with front_door(dispatcher) as door:
        _, body = await door.complete(prompt=[[5], [5, 6]], n=2, seed=10, best_of=2)
    assert [choice["text"] for choice in body["choices"]] == ["1", "1", "2", "2"]
    assert [r.sampling.seed for r in dispatcher.requests] == [10, 11, 10, 11]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", ["Hi 😀", [5, 6, 7]])
async def test_echo_begins_the_answer_with_the_prompt(prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else TEXT.decode(prompt, skip_special_tokens=False)
    async with front_door(FakeDispatcher(answer(" yes"))) as door:
        _, body = await door.complete(prompt=prompt, echo=True)
        events = await stream(door, prompt=prompt, echo=True)
    assert body["choices"][0]["text"] == f"{text} yes"
    assert "".join(event["choices"][0]["text"] for event in events) == f"{text} yes"


async def test_stream() -> None:
    script = answer("one two", finish=FinishReason.LENGTH)
    async with front_door(FakeDispatcher(script)) as door:
        events = await stream(door, n=2, stream_options={"include_usage": True})
    *chunks, usage = events
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine] == ["one", " two"]
        assert [choice["finish_reason"] for choice in mine] == [None, "length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)


async def test_logprobs() -> None:
    async with front_door(FakeDispatcher(answer("one two"))) as door:
        _, body = await door.complete(logprobs=2)
        _, bare = await door.complete(logprobs=0)
        events = await stream(door, logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    # The token that ended the answer is no part of it.
    assert logprobs["tokens"] == ["one", " two"]
    assert logprobs["text_offset"] == [0, 3]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    # The token itself, which the fake engine counts to none of the likeliest, and two of those.
    assert [sorted(top.values()) for top in logprobs["top_logprobs"]] == [[-1.5, -0.5, -0.5]] * 2
    assert bare["choices"][0]["logprobs"]["top_logprobs"] == [{"one": -0.5}, {" two": -0.5}]
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [lists["text_offset"] for lists in streamed if lists["tokens"]] == [[0], [3]]


async def test_a_shared_beginning_is_tokenized_and_hashed_once() -> None:
    dispatcher = FakeDispatcher(block_size=16)
    document = "The same long document is pasted by everyone who asks about it. " * 100
    async with front_door(dispatcher) as door:
        for question in ("What is it?", "Who pasted it?"):
            status, _ = await door.complete(prompt=document + question, max_tokens=4)
            assert status == 200
        hits = door.services.metrics.prompt_cache_hits.labels(MODEL)._value.get()
        status, again = await door.post("/tokenize", {"prompt": document + "What is it?"})
    first, second = dispatcher.requests
    assert list(first.token_ids) == TEXT.encode(document + "What is it?") == again["tokens"]
    assert list(second.token_ids) == TEXT.encode(document + "Who pasted it?")
    assert dispatcher.hashes == [
        sequence_hashes(request.token_ids, 16) for request in dispatcher.requests
    ]
    assert hits > 0.9 * len(second.token_ids)


async def test_options_of_the_engine_go_with_the_request() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        await door.complete(engine_options={"bad_words": ["no"], "depth": 3})
        await door.complete()
        status, refused = await door.complete(engine_options=["bad_words"])
    assert [request.options for request in dispatcher.requests] == [
        {"bad_words": ["no"], "depth": 3},
        {},
    ]
    assert (status, refused["error"]["param"]) == (400, "engine_options")


async def test_a_salted_prompt_has_hashes_of_its_own() -> None:
    dispatcher = FakeDispatcher(block_size=16)
    async with front_door(dispatcher) as door:
        await door.complete(prompt="The same text. " * 50, max_tokens=4, cache_salt="tenant-1")
        await door.complete(prompt="The same text. " * 50, max_tokens=4)
    salted, plain = dispatcher.requests
    assert salted.cache_salt == "tenant-1"
    assert dispatcher.hashes == [
        sequence_hashes(salted.token_ids, 16, cache_salt="tenant-1"),
        sequence_hashes(plain.token_ids, 16),
    ]


async def test_the_prompt_cache_can_be_off() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, prompt_cache_bytes=0) as door:
        await door.complete(prompt="word " * 2_000, max_tokens=4)
        await door.complete(prompt="word " * 2_000, max_tokens=4)
        assert door.services.preprocessors[MODEL].cache_bytes == 0
    assert dispatcher.hashes == [None, None]
