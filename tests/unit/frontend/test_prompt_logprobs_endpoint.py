"""Log probabilities of prompts, token ids and what else an answer tells beside its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from openai.types import Completion
from pydantic import ValidationError
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, FrontDoor, answer, front_door

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    TokenDelta,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def events(door: FrontDoor, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "stream": True, **body}
    async with door.session.post(door.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        sent = (await response.read()).decode()
    lines = [line.removeprefix("data: ") for line in sent.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_log_likelihood_is_asked_for_by_echo() -> None:
    """As lm-eval does: batches of token ids, one token more, or none."""
    prompts = [TEXT.encode("The capital of France is"), TEXT.encode("Hi there")]
    dispatcher = FakeDispatcher(answer(" Paris."))
    async with front_door(dispatcher) as door:
        asked: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
        _, none = await door.complete(max_tokens=0, **asked)
        _, one = await door.complete(max_tokens=1, **asked)
    assert [request.prompt_logprobs for request in dispatcher.requests] == [1] * 4
    assert {request.sampling.max_tokens for request in dispatcher.requests} == {1}
    for body, more in ((none, 0), (one, 1)):
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            told = choice["logprobs"]
            shown = [TEXT.token_text(token) for token in prompt]
            assert told["tokens"] == [*shown, " Paris"][: len(prompt) + more]
            assert choice["text"] == "".join(told["tokens"])
            assert (
                told["token_logprobs"]
                == [None, *[-1.0] * (len(prompt) - 1), -0.5][: len(prompt) + more]
            )
            starts = [sum(map(len, told["tokens"][:place])) for place in range(len(prompt) + more)]
            assert told["text_offset"] == starts
            assert told["top_logprobs"][0] is None
            for token, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True):
                assert token in top
    assert none["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in none["choices"]} == {"length"}


async def test_all_but_the_first_token_is_as_the_client_of_openai_checks_it() -> None:
    async with front_door(FakeDispatcher(answer(" Paris."))) as door:
        _, body = await door.complete(prompt="The capital", echo=True, logprobs=1)
    with pytest.raises(ValidationError) as refused:
        Completion.model_validate(body)
    places = [".".join(map(str, one["loc"])) for one in refused.value.errors()]
    lists = ("token_logprobs", "top_logprobs")
    assert sorted(places) == [f"choices.0.logprobs.{name}.0" for name in lists]


async def test_streams_tell_the_same_as_whole_answers() -> None:
    async with front_door(FakeDispatcher(answer(" Paris is it."))) as door:
        asked = {"prompt": "The capital of France is", "echo": True, "logprobs": 2}
        _, whole = await door.complete(**asked)
        chunks = await events(door, COMPLETIONS, **asked)
    (choice,) = whole["choices"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == values


async def test_prompt_logprobs_of_vllm() -> None:
    async with front_door(FakeDispatcher(answer("Hello"))) as door:
        _, completed = await door.complete(prompt=["One two", "Three"], prompt_logprobs=1)
        _, said = await door.chat(prompt_logprobs=0)
        _, plain = await door.chat()
    first, second = (choice["prompt_logprobs"] for choice in completed["choices"])
    ids = TEXT.encode("One two")
    assert first[0] is None
    assert first[1] == {
        str(ids[1]): {"logprob": -1.0, "rank": 4, "decoded_token": TEXT.token_text(ids[1])},
        "0": {"logprob": -2.0, "rank": 1, "decoded_token": TEXT.token_text(0)},
    }
    assert second == [None]
    assert len(said["prompt_logprobs"]) == said["usage"]["prompt_tokens"]
    assert all(len(one) == 1 for one in said["prompt_logprobs"][1:])
    assert plain["prompt_logprobs"] is None


async def test_an_engine_that_sends_too_few_fails() -> None:
    told = answer("Hello")

    def silent(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        return told(evolve(request, prompt_logprobs=None))

    async with front_door(FakeDispatcher(silent)) as door:
        status, _ = await door.chat(prompt_logprobs=0)
    assert status == 500


async def test_token_ids_and_names_of_tokens() -> None:
    dispatcher = FakeDispatcher(answer("one two"))
    async with front_door(dispatcher) as door:
        _, done = await door.complete(
            prompt="Hi", return_token_ids=True, return_tokens_as_token_ids=True, logprobs=0
        )
        chunks = await events(door, CHAT, messages=says("Hi"), return_token_ids=True)
    ids = [*TEXT.encode("one two", add_special_tokens=False), *TEXT.eos_ids]
    (choice,) = done["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (TEXT.encode("Hi"), ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert chunks[0]["prompt_token_ids"] == [*dispatcher.requests[1].token_ids]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    told = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", ())]
    assert told == ids


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_each_chunk_tells_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with front_door(FakeDispatcher(answer("one two three"))) as door:
        chunks = await events(door, CHAT, messages=says("Hi"), stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted[0] == 0
    assert counted == sorted(counted)
    assert counted[-1] == counted[-2] == 4


async def test_what_ended_an_answer_is_told() -> None:
    two = TEXT.encode(" two", add_special_tokens=False)[0]
    script = answer("one two three")
    ended: list[TokenDelta | Exception] = [
        TokenDelta(token_ids=(two,), finish_reason=FinishReason.STOP, stop_reason=two)
    ]
    async with front_door(FakeDispatcher(script)) as door:
        _, by_string = await door.complete(stop=["three"])
        _, by_model = await door.complete()
    assert by_string["choices"][0]["stop_reason"] == "three"
    assert by_model["choices"][0]["stop_reason"] is None
    async with front_door(FakeDispatcher(lambda _: ended)) as door:
        _, named = await door.complete(stop_token_ids=[two])
        _, unnamed = await door.complete()
    assert named["choices"][0]["stop_reason"] == two
    assert unnamed["choices"][0]["stop_reason"] is None


async def test_prompts_are_cut_at_either_end() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        ids = [*range(10, 18)]
        await door.complete(prompt=ids, truncate_prompt_tokens=3)
        await door.complete(prompt=ids, truncate_prompt_tokens=3, truncation_side="right")
        _, echoed = await door.complete(prompt="a b c d", truncate_prompt_tokens=2, echo=True)
        await door.complete(prompt=ids, truncate_prompt_tokens=100)
    kept = [[*request.token_ids] for request in dispatcher.requests]
    assert kept == [ids[-3:], ids[:3], TEXT.encode("a b c d")[-2:], ids]
    assert echoed["choices"][0]["text"].startswith(" c d")


async def test_fields_of_engines_become_options() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        await door.chat(bad_words=["no"], allowed_token_ids=[5], engine_options={"depth": 3})
        status, refused = await door.chat(bad_words=["no"], engine_options={"bad_words": ["x"]})
    assert dispatcher.requests[0].options == {
        "depth": 3,
        "bad_words": ["no"],
        "allowed_token_ids": [5],
    }
    assert (status, refused["error"]["param"], len(dispatcher.requests)) == (400, "bad_words", 1)


async def test_a_chat_may_be_repeated_in_its_answer() -> None:
    messages = [*says("Say it"), {"role": "assistant", "content": "An apple a day"}]
    asked = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    async with front_door(FakeDispatcher(answer(" keeps"))) as door:
        _, whole = await door.chat(messages=messages, **asked)
        chunks = await events(door, CHAT, messages=messages, **asked)
        _, question = await door.chat(messages=says("Say it"), echo=True)
    assert whole["choices"][0]["message"]["content"] == "An apple a day keeps"
    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert told == "An apple a day keeps"
    assert question["choices"][0]["message"]["content"] == " keeps"


async def test_several_conversations_at_once() -> None:
    dispatcher = FakeDispatcher(answer("Yes"))
    async with front_door(dispatcher) as door:
        conversations = [says("Is the sky blue?"), says("Is fire cold, really?")]
        status, body = await door.post(CHAT + "/batch", {"messages": conversations, "n": 2})
        wrong, refused = await door.post(CHAT + "/batch", {"messages": says("x")})
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    prompts = [TEXT.decode(request.token_ids) for request in dispatcher.requests]
    assert [("sky" in text, "fire" in text) for text in prompts] == [
        *[(True, False)] * 2,
        *[(False, True)] * 2,
    ]
    assert len({request.request_id for request in dispatcher.requests}) == 4
    assert body["usage"]["prompt_tokens"] == sum(
        len(request.token_ids) for request in dispatcher.requests[::2]
    )
    assert (wrong, refused["error"]["param"]) == (400, "messages[0]")


async def test_invocations_are_what_their_bodies_show() -> None:
    async with front_door(FakeDispatcher(answer("Yes"))) as door:
        _, said = await door.post("/invocations", {"messages": says("Hi")})
        _, completed = await door.post("/invocations", {"prompt": "Hi"})
        status, _ = await door.post("/invocations", {"odd": 1})
    assert (said["object"], completed["object"]) == ("chat.completion", "text_completion")
    assert status == 400


async def test_what_proxies_and_remote_tokenizers_ask() -> None:
    async with front_door(FakeDispatcher(answer("Yes"))) as door:
        _, info = await door.get("/tokenizer_info")
        _, told = await door.get("/version")
        _, load = await door.get("/load")
        _, counted = await door.post("/tokenize", {"prompt": "a b", "return_token_strs": True})
        headers = {"endpoint-load-metrics-format": "json"}
        body = {"messages": says("Hi"), "tool_choice": "auto"}
        async with door.session.post(door.url + CHAT, json=body, headers=headers) as response:
            report = response.headers["endpoint-load-metrics"]
            assert response.headers["X-Commutator-Ignored"] == "tool_choice"
    assert info["tokenizer_class"]
    assert info["eos_token"] == "<|im_end|>"
    assert info["model_max_length"] >= counted["max_model_len"]
    assert "im_start" in info["chat_template"]
    assert told["version"]
    assert load == {"server_load": 0}
    assert counted["token_strs"] == ["a", "Ġb"]
    assert report.startswith("JSON ")
    assert set(json.loads(report.removeprefix("JSON "))["named_metrics"]) == {
        "num_requests_running",
        "num_requests_waiting",
    }


async def test_any_role_is_the_templates() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, _ = await door.chat(messages=[{"role": "my-critic", "content": "Hm."}])
    assert status == 200
    assert "my-critic" in TEXT.decode(dispatcher.requests[0].token_ids)


async def test_with_token_ids_the_token_that_ended_the_answer_has_logprobs() -> None:
    async with front_door(FakeDispatcher(answer("one two"))) as door:
        asked = {"logprobs": 1, "return_tokens_as_token_ids": True}
        _, plain = await door.complete(**asked)
        _, told = await door.complete(**asked, return_token_ids=True)
    (choice,) = told["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    assert plain["choices"][0]["logprobs"]["tokens"] == named[:-1]


async def test_a_chats_prompt_may_be_given_in_tokens() -> None:
    dispatcher = FakeDispatcher(answer("Yes"))
    async with front_door(dispatcher) as door:
        given = {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}}
        _, body = await door.chat(**given, max_tokens=4, return_token_ids=True)
        length, _ = await door.chat(**given)
        moved, refused = await door.chat(
            kv_transfer_params={"prompt_token_ids": [5], "remote_host": "a"}, max_tokens=4
        )
    assert body["prompt_token_ids"] == [5, 6, 7]
    assert body["choices"][0]["message"]["content"] == "Yes"
    assert [[*request.token_ids] for request in dispatcher.requests] == [[5, 6, 7]]
    assert (length, moved) == (400, 400)
    assert refused["error"]["code"] == "not_allowed"
