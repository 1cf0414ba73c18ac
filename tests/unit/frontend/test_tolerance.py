"""What clients send beside the fields that are served: set aside, named, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, front_door

from commutator.errors import RequestError
from commutator_openai.chat import parse_body
from commutator_openai.requests import ChatRequest, CompletionRequest, TokenizeRequest
from commutator_openai.tolerance import for_engine, ignored_header

CHAT = "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

NEUTRAL: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True,
    "bad_words": [], "echo": False, "add_special_tokens": False, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "include_reasoning": True, "stream_interval": 1,
    "return_prompt_text": False, "best_of": None, "documents": None, "chat_template": None,
    "media_io_kwargs": None, "mm_processor_kwargs": None, "prompt_logprobs": None,
    "allowed_token_ids": None, "truncate_prompt_tokens": None, "thinking_token_budget": None,
    "kv_transfer_params": None, "vllm_xargs": None, "watermarking": None,
    "logprob_token_ids": None, "repetition_detection": None, "never_heard_of": None,
}  # fmt: skip

IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"response_model": "Answer", "keep_alive": 5}, "response_model, keep_alive"),
    ({"tempratur": 1}, "tempratur"),
    ({"messages": [{**MESSAGES[0], "id": "m", "createdAt": 1}]}, "messages.id, messages.createdAt"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]}]},
        "messages.content.x",
    ),
    ({"stream": True, "stream_options": {"odd": True}}, "stream_options.odd"),
    ({"a\r\nSet-Cookie: b": 1}, "?"),
    ({"store": True, "odd": 1}, "store, odd"),
]


@pytest.mark.parametrize("strict", [False, True])
async def test_neutral_values_are_as_good_as_none(strict: bool) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, strict=strict) as door:
        for name, value in NEUTRAL.items():
            body = {"model": MODEL, "messages": MESSAGES, name: value}
            async with door.session.post(door.url + CHAT, json=body) as answer:
                assert answer.status == 200, name
                assert "X-Commutator-Ignored" not in answer.headers
                await answer.read()


@pytest.mark.parametrize(("more", "named"), IGNORED, ids=[named for _, named in IGNORED])
async def test_the_unknown_is_ignored_and_named(more: dict[str, Any], named: str) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        plain = {"model": MODEL, "messages": MESSAGES, "stream": more.get("stream", False)}
        for sent, header in ((plain | more, named), (plain, None)):
            async with door.session.post(door.url + CHAT, json=sent) as answer:
                assert answer.status == 200
                assert answer.headers.get("X-Commutator-Ignored") == header
                await answer.read()
    first, second = dispatcher.requests
    assert evolve(first, request_id="") == evolve(second, request_id="")


@pytest.mark.parametrize(("more", "named"), IGNORED, ids=[named for _, named in IGNORED])
async def test_strict_refuses_it(more: dict[str, Any], named: str) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, strict=True) as door:
        status, body = await door.chat(**more)
    assert (status, dispatcher.requests) == (400, [])
    assert body["error"]["code"] in ("unknown_parameter", "unsupported_parameter")


async def test_tokenize_is_as_tolerant() -> None:
    async with front_door(FakeDispatcher()) as door:
        body = {"model": MODEL, "prompt": "Hi", "tools": None, "odd": 1, "return_token_strs": None}
        async with door.session.post(door.url + "/tokenize", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["X-Commutator-Ignored"] == "odd"
    async with front_door(FakeDispatcher(), strict=True) as door:
        status, _ = await door.post("/tokenize", {"prompt": "Hi", "odd": 1})
        assert status == 400


@pytest.mark.parametrize(
    "asked",
    [
        {"use_beam_search": True},
        {"prompt_logprobs": "2"},
        {"return_prompt_text": True},
        {"thinking_token_budget": -2},
    ],
    ids="+".join,
)
async def test_what_was_asked_for_is_never_ignored(asked: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.chat(**asked, odd=1)
    assert (status, body["error"]["param"]) == (400, next(iter(asked)))
    assert dispatcher.requests == []


def test_nulls_stand_for_defaults_everywhere() -> None:
    function = {"name": "f", "arguments": None}
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "Hi", "name": None, "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
            {"role": "tool", "content": "1", "tool_call_id": "1", "name": None},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "strict": None}}],
    }
    read = parse_body(ChatRequest, json.dumps(body).encode())
    assert read.messages[1].tool_calls is not None
    assert read.messages[1].tool_calls[0].function.arguments == ""


def test_what_is_required_is_still_required() -> None:
    for body in ({"model": MODEL, "messages": None}, {"model": MODEL, "odd": 1}):
        with pytest.raises(RequestError, match="messages"):
            parse_body(ChatRequest, json.dumps(body).encode())


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(more=st.dictionaries(st.text("xyz_", min_size=2, max_size=6), ANY, max_size=4))
def test_whatever_is_unknown_changes_nothing(more: dict[str, Any]) -> None:
    for cls, body in (
        (ChatRequest, {"model": MODEL, "messages": MESSAGES}),
        (CompletionRequest, {"model": MODEL, "prompt": "Hi"}),
        (TokenizeRequest, {"prompt": "Hi"}),
    ):
        odd, plain = json.dumps({**more, **body}).encode(), json.dumps(body).encode()
        assert parse_body(cls, odd) == parse_body(cls, plain)


def test_an_engine_gets_what_clients_may_say() -> None:
    body = {"model": MODEL, "messages": MESSAGES, "prompt_logprobs": 1, "odd": 1, "rid": "x"}
    passed, ignored = for_engine(body, ChatRequest)
    assert passed == {"model": MODEL, "messages": MESSAGES, "prompt_logprobs": 1}
    assert ignored == ["odd", "rid"]


@given(names=st.lists(st.text()))
def test_a_header_holds_nothing_that_ends_it(names: list[str]) -> None:
    assert ignored_header(names).isascii()
    assert "\n" not in ignored_header(names)
