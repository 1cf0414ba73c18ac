"""POST /v1/chat/completions in the shapes of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, FrontDoor, answer, front_door

from commutator.contract.request import FinishReason


async def stream(door: FrontDoor, **body: Any) -> list[Any]:
    """The events of a chat stream; [DONE] as it is."""
    payload = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    url = f"{door.url}/v1/chat/completions"
    async with door.session.post(url, json=payload | body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


async def test_whole_answer() -> None:
    async with front_door(FakeDispatcher(answer("Hi! 😀", cached_tokens=16))) as door:
        status, body = await door.chat()
    assert status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    usage = body.pop("usage")
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi! 😀", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
    }
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(TEXT.encode("Hi! 😀")) + 1  # EOS was generated too


async def test_stream_has_openais_chunks_in_order() -> None:
    async with front_door(FakeDispatcher(answer("Hello there!"))) as door:
        events = await stream(door)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [d["content"] for d in deltas[1:-1]] == ["Hello", " there", "!"]
    assert deltas[-1] == {}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]


async def test_include_usage_adds_one_chunk_without_choices() -> None:
    async with front_door(FakeDispatcher(answer("Hello", cached_tokens=8))) as door:
        events = await stream(door, stream_options={"include_usage": True})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


async def test_characters_of_several_tokens_arrive_whole() -> None:
    text = "naïve 日本語 👨‍👩‍👧"
    async with front_door(FakeDispatcher(answer(text))) as door:
        events = await stream(door)
    contents = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(contents) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in content for content in contents)


async def test_the_prompt_is_the_models_own_template() -> None:
    dispatcher = FakeDispatcher()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with front_door(dispatcher) as door:
        await door.chat(messages=messages)
    assert TEXT.decode(dispatcher.requests[0].token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_continuing_the_final_message() -> None:
    dispatcher = FakeDispatcher()
    messages = [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "It is"},
    ]
    async with front_door(dispatcher) as door:
        await door.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
        status, body = await door.chat(messages=messages, continue_final_message=True)
    prompt = TEXT.decode(dispatcher.requests[0].token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_parameters_reach_the_engine() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        await door.chat(
            max_completion_tokens=7,
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=5,
            repetition_penalty=1.1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"5": -100},
            logprobs=True,
            top_logprobs=2,
            stop=["\n", "END"],
            stop_token_ids=[9],
            cache_salt="s",
            priority=3,
            session_id="alice",
        )
        await door.chat(prompt_cache_key="bob", ignore_eos=True, top_k=-1, temperature=None)
    first, second = dispatcher.requests
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (7, 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.top_logprobs == 2
    assert sampling.stop == ("\n", "END")
    assert sampling.stop_token_ids == (2, 9)  # the model's own EOS as well
    assert (first.cache_salt, first.priority) == ("s", 3)
    assert [caller.session_id for caller in dispatcher.callers] == ["alice", "bob"]
    assert (second.sampling.top_k, second.sampling.temperature) == (0, 1.0)
    assert second.sampling.ignore_eos
    assert second.sampling.stop_token_ids == ()
    assert second.sampling.max_tokens == TEXT.max_model_len - len(second.token_ids)


async def test_several_answers() -> None:
    dispatcher = FakeDispatcher(answer("Yes"))
    async with front_door(dispatcher) as door:
        _, body = await door.chat(n=3, seed=2**63 - 1)
        events = await stream(door, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Yes"}
    assert [r.sampling.seed for r in dispatcher.requests[:3]] == [2**63 - 1, -(2**63), -(2**63) + 1]
    base = body["id"].removeprefix("chatcmpl-")
    assert [r.request_id for r in dispatcher.requests[:3]] == [f"{base}-{i}" for i in range(3)]
    assert body["usage"]["prompt_tokens"] == len(dispatcher.requests[0].token_ids)
    assert body["usage"]["completion_tokens"] == 6
    assert (text_of(events, 0), text_of(events, 1)) == ("Yes", "Yes")
    assert dispatcher.open == 0


@pytest.mark.parametrize("streaming", [True, False])
async def test_logprobs_add_up_to_the_text(streaming: bool) -> None:
    text = "one two END three"
    async with front_door(FakeDispatcher(answer(text))) as door:
        options = {"logprobs": True, "top_logprobs": 2, "stop": " END"}
        if streaming:
            events = await stream(door, **options)
            choices = [event["choices"][0] for event in events[:-1]]
            entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
            content = text_of(events)
        else:
            _, body = await door.chat(**options)
            entries = body["choices"][0]["logprobs"]["content"]
            content = body["choices"][0]["message"]["content"]
    assert content == "one two"
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content
    assert [entry["logprob"] for entry in entries] == [-0.5] * len(entries)
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -1.5]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1_000])
@pytest.mark.parametrize("times", [1, 30])  # small, and large enough for threads and parts
async def test_an_answer_that_looks_like_the_json_around_it_is_only_text(
    times: int, tokens_per_delta: int
) -> None:
    text = (
        '"choices":[],"content":[],"logprobs":{"tokens":[],"text_offset":[]}\\"tokens":[] 😀 '
        * times
    )
    script = answer(text, tokens_per_delta=tokens_per_delta)
    wanted = {"max_tokens": 1_900, "n": 4}
    async with front_door(FakeDispatcher(script)) as door:
        _, plain = await door.chat(**wanted)
        _, chat = await door.chat(logprobs=True, top_logprobs=12, **wanted)
        _, completion = await door.complete(logprobs=3, **wanted)
    assert [choice["message"]["content"] for choice in plain["choices"]] == [text] * 4
    for choice in chat["choices"]:
        entries = choice["logprobs"]["content"]
        assert choice["message"]["content"] == text
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
        assert {len(entry["top_logprobs"]) for entry in entries} == {12}
    for choice in completion["choices"]:
        lists = choice["logprobs"]
        assert choice["text"] == text
        assert {len(one) for one in lists.values()} == {len(entries)}
        assert lists["text_offset"] == sorted(lists["text_offset"])


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 50])
@pytest.mark.parametrize("streaming", [True, False])
async def test_stop_strings_end_the_answer_and_the_engines_work(
    streaming: bool, tokens_per_delta: int
) -> None:
    dispatcher = FakeDispatcher(
        answer("Count: 1, 2, 3, 4, 5, 6", tokens_per_delta=tokens_per_delta)
    )
    async with front_door(dispatcher) as door:
        if streaming:
            events = await stream(door, stop=["zzz", ", 4"])
            content, reason = text_of(events), events[-2]["choices"][0]["finish_reason"]
            kept = text_of(await stream(door, stop=", 4", include_stop_str_in_output=True))
        else:
            _, body = await door.chat(stop=["zzz", ", 4"])
            content = body["choices"][0]["message"]["content"]
            reason = body["choices"][0]["finish_reason"]
            _, body = await door.chat(stop=", 4", include_stop_str_in_output=True)
            kept = body["choices"][0]["message"]["content"]
        assert (content, reason, kept) == ("Count: 1, 2, 3", "stop", "Count: 1, 2, 3, 4")
        assert dispatcher.open == 0


async def test_a_stop_string_that_never_comes_is_let_go_at_the_end() -> None:
    script = answer("wait <en", finish=FinishReason.LENGTH)
    async with front_door(FakeDispatcher(script)) as door:
        _, body = await door.chat(stop="<end>")
    assert body["choices"][0]["message"]["content"] == "wait <en"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_stop_strings_wait_for_min_tokens() -> None:
    async with front_door(FakeDispatcher(answer("a b a b a b"))) as door:
        _, body = await door.chat(stop=" b", min_tokens=4)
    assert body["choices"][0]["message"]["content"] == "a b a b a"


async def test_special_tokens_are_shown_only_on_demand() -> None:
    async with front_door(FakeDispatcher(answer("a<|im_start|>b"))) as door:
        _, hidden = await door.chat()
        _, shown = await door.chat(skip_special_tokens=False)
        _, everything = await door.chat(skip_special_tokens=False, include_stop_str_in_output=True)
    contents = [body["choices"][0]["message"]["content"] for body in (hidden, shown, everything)]
    assert contents == ["ab", "a<|im_start|>b", "a<|im_start|>b<|im_end|>"]


async def test_what_openai_clients_send_back_is_accepted() -> None:
    """The official client's own message objects hold nulls for what there was not."""
    reply = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": None}
    reply |= {"audio": None, "function_call": None, "tool_calls": None}
    async with front_door(FakeDispatcher()) as door:
        status, _ = await door.chat(
            messages=[{"role": "user", "content": "Hi", "name": "ann"}, reply, reply],
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            modalities=["text"],
            service_tier="auto",
            store=False,
            parallel_tool_calls=True,
            n=None,
            user="ann",
        )
    assert status == 200


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "refusal", "refusal": "No.", "zzz": 1}]},
    ],
)
async def test_an_earlier_refusal_is_what_the_assistant_said(refused: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        for said in ({"content": "No."}, refused):
            user = {"role": "user", "content": "Hi"}
            messages = [user, {"role": "assistant", **said}, user]
            assert (await door.chat(messages=messages))[0] == 200
    plain, other = dispatcher.requests
    assert plain.token_ids == other.token_ids


@pytest.mark.parametrize("kind", ["text", "refusal"])
async def test_a_part_without_its_text_is_refused(kind: str) -> None:
    async with front_door(FakeDispatcher()) as door:
        messages = [{"role": "user", "content": [{"type": kind}]}]
        status, body = await door.chat(messages=messages)
    param = f"messages[0].content[0].{kind}"
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["code"] == "missing_required_parameter"
