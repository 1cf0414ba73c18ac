"""What is wrong or not supported is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, front_door
from tests.support.work import calls_of

from commutator.errors import RequestError
from commutator_openai.chat import parse_body
from commutator_openai.requests import ChatRequest, CompletionRequest

TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def says(content: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


CHAT = [
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stop": ["a", 1]}, "stop[1]", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": "x" * 513}, "stop", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"bad_words": [""]}, "bad_words[0]", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "left"}, "truncation_side", "invalid_value"),
    ({"reasoning_effort": "extra_high"}, "reasoning_effort", "invalid_value"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not_allowed"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    (says(None), "messages[0].content", "missing_required_parameter"),
    (says("x", role="function"), "messages[0].role", "unsupported_parameter"),
    (says("x", role="<|im_end|>"), "messages[0].role", "invalid_value"),
    (says("x", role=["user"]), "messages[0].role", "invalid_value"),
    (says([IMAGE]), "messages[0].content[0].type", "unsupported_parameter"),
    (says([]), "messages[0].content", "invalid_value"),
    (
        says("x", role="assistant", tool_calls=[TOOL]),
        "messages[0].tool_calls[0].id",
        "missing_required_parameter",
    ),
    (says("x", tool_calls=[{**TOOL, "id": "1"}]), "messages[0].tool_calls", None),
    (says("x", role="tool"), "messages[0].tool_call_id", "missing_required_parameter"),
    ({"tools": [TOOL]}, "tools", "unsupported_parameter"),
    ({"tools": [TOOL, TOOL]}, "tools", None),
    ({"tools": [{"type": "mcp", "server_url": "x"}]}, "tools", "unsupported_parameter"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tools", "unsupported_parameter"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
]
COMPLETION = [
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": ["a", 5]}, "prompt", "invalid_value"),
    ({"prompt": [5, -1]}, "prompt", "invalid_value"),
    ({"prompt": [5, True]}, "prompt", "invalid_value"),
    ({"prompt": [49152]}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 100, "n": 3}, "n", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    (
        {"max_tokens": 0, "echo": True, "logprobs": 1, "logprob_token_ids": [5]},
        "logprob_token_ids",
        "invalid_value",
    ),
    ({"logprobs": True}, "logprobs", "invalid_value"),
]


@pytest.mark.parametrize(("wrong", "param", "code"), CHAT, ids=lambda value: str(value)[:40])
async def test_chat(wrong: dict[str, Any], param: str, code: str | None) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.chat(**wrong)
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0] in error["message"]
    if code is not None:
        assert error["code"] == code
    assert dispatcher.requests == []


@pytest.mark.parametrize(("wrong", "param", "code"), COMPLETION, ids=lambda value: str(value)[:40])
async def test_completions(wrong: dict[str, Any], param: str, code: str | None) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.complete(**wrong)
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert dispatcher.requests == []


async def test_every_mistake_is_reported_at_once_with_the_nearest_name() -> None:
    async with front_door(FakeDispatcher(), strict=True) as door:
        _, body = await door.chat(temperature="hot", max_token=5, n=0)
    message = body["error"]["message"]
    assert 'temperature: expected a number from 0 to 2, got "hot"' in message
    assert "n: expected an integer from 1 to 128, got 0" in message
    assert 'max_token: unknown key; did you mean "max_tokens"?' in message


async def test_a_key_of_another_path_names_the_path() -> None:
    async with front_door(FakeDispatcher(), strict=True) as door:
        _, body = await door.complete(messages=[1])
        assert "messages: unknown key; requests with it go to /v1/chat/completions" in str(body)
        _, body = await door.chat(prompt="x")
        assert "prompt: unknown key; requests with it go to /v1/completions" in str(body)


async def test_an_unknown_model_is_404() -> None:
    async with front_door(FakeDispatcher()) as door:
        status, body = await door.chat(model="gpt-9")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["param"] == "model"
    assert MODEL in body["error"]["message"]


@pytest.mark.parametrize("chat", [True, False])
async def test_an_over_long_prompt_is_refused_with_both_lengths(chat: bool) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        dispatcher.longest = 50
        if chat:
            status, body = await door.chat(messages=says("word " * 60)["messages"])
        else:
            status, body = await door.complete(prompt="word " * 60)
        _, too_many = await door.complete(prompt=[5] * 40, max_tokens=11)
        fits, _ = await door.complete(prompt=[5] * 40, max_tokens=10)
        full, _ = await door.complete(prompt=[5] * 50)
    error = body["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if chat else "prompt")
    assert "context is 50 tokens (of 8192: memory or an option" in error["message"]
    assert "the prompt has 40 and 11 more are asked for" in too_many["error"]["message"]
    assert (fits, full) == (200, 400)


async def test_a_chat_that_asks_for_more_than_there_is_gets_what_there_is() -> None:
    """Agents ask for 32,000 tokens or more, whatever the model."""
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        body = {"model": MODEL, **says("Hi"), "max_tokens": 10**6}
        async with door.session.post(f"{door.url}/v1/chat/completions", json=body) as sent:
            assert sent.status == 200
            told = int(sent.headers["X-Commutator-Max-Tokens"])
        (request,) = dispatcher.requests
    assert request.sampling.max_tokens == told == TEXT.max_model_len - len(request.token_ids)
    assert len(dispatcher.requests) == 1


async def test_the_models_own_length_counts_as_well() -> None:
    async with front_door(FakeDispatcher(longest=10**6)) as door:
        status, body = await door.complete(prompt=[5] * TEXT.max_model_len)
    assert status == 400
    assert str(TEXT.max_model_len) in body["error"]["message"]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b'{"model": NaN}', 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "too_complex"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 400, None),
        (b'{"temperature": 1e999}', 400, "invalid_json"),
        (b'{"model": "m", "prompt": "", "n": ' + b"9" * 4000 + b"}", 400, "invalid_value"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_what_is_not_a_json_object(data: bytes, status: int, code: str | None) -> None:
    async with front_door(FakeDispatcher()) as door:
        url = f"{door.url}/v1/completions"
        headers = {"Content-Type": "application/json"}
        async with door.session.post(url, data=data, headers=headers) as response:
            body = await response.json()
    assert response.status == status
    assert body["error"]["type"] == "invalid_request_error"
    if code is not None:
        assert body["error"]["code"] == code


@pytest.mark.security
async def test_only_json_is_read() -> None:
    async with front_door(FakeDispatcher()) as door:
        url = f"{door.url}/v1/completions"
        data = b'{"model": "smol", "prompt": "x"}'
        plain = door.session.post(url, data=data, headers={"Content-Type": "text/plain"})
        untyped = door.session.post(url, data=data, skip_auto_headers=["Content-Type"])
        for asked in (plain, untyped):
            async with asked as response:
                assert response.status == 415
                assert (await response.json())["error"]["code"] == "unsupported_media_type"
        headers = {"Content-Type": "application/problem+json; charset=utf-8"}
        async with door.session.post(url, data=data, headers=headers) as response:
            assert response.status == 200


async def test_a_compressed_body_that_is_none_is_refused() -> None:
    async with front_door(FakeDispatcher()) as door:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        url = f"{door.url}/v1/completions"
        async with door.session.post(url, data=b"not gzip", headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_body"


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_over_the_limit_is_413(chunked: bool) -> None:
    async with front_door(FakeDispatcher(), max_body_bytes=1000) as door:

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        data = pieces() if chunked else b" " * 2000
        headers = {"Content-Type": "application/json"}
        url = f"{door.url}/v1/completions"
        async with door.session.post(url, data=data, headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(("expect", "status"), [("100-continue", 200), ("a miracle", 417)])
async def test_expectations(expect: str, status: int) -> None:
    async with front_door(FakeDispatcher()) as door:
        url, body = f"{door.url}/v1/completions", {"model": MODEL, "prompt": "x"}
        async with door.session.post(url, json=body, headers={"Expect": expect}) as response:
            assert response.status == status
            answered = await response.json()
    if status == 417:
        assert answered["error"]["code"] == "expectation_failed"
        assert "a miracle" in answered["error"]["message"]


async def test_paths_and_methods() -> None:
    async with front_door(FakeDispatcher()) as door:
        missing, body = await door.get("/v2/chat")
        assert (missing, body["error"]["code"]) == (404, "not_found")
        async with door.session.get(f"{door.url}/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["code"] == "method_not_allowed"


def test_many_mistakes_cost_little() -> None:
    """A million wrong items are refused by a few calls for each, and a short message."""
    for body, items in (
        (b'{"model":"m","messages":[' + b"1," * 500_000 + b"1]}", 500_000),
        (b'{"model":"m","stop":[' + b"1," * 500_000 + b"1]}", 500_000),
        (b'{"model":"m",' + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}", 100_000),
    ):
        said: list[str] = []

        def parse() -> None:
            with pytest.raises(RequestError) as caught:
                parse_body(ChatRequest, body)  # noqa: B023 - at once
            said.append(str(caught.value))  # noqa: B023

        calls = calls_of(parse)
        print(calls / items)
        assert calls < 10 * items
        assert len(said[0]) < 3000


def test_long_prompts_of_token_ids_parse_quickly() -> None:
    body = b'{"model":"m","prompt":[' + b"5," * 100_000 + b"5]}"
    assert len(parse_body(CompletionRequest, body).prompt[0]) == 100_001
