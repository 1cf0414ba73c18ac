"""Parameters without effect are ignored by name, or refused; so are logprobs nobody computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, evolve
from tests.support.front_door import MODEL, FakeDispatcher, answer, front_door

from commutator.contract.request import UNKNOWN_CALLER, Caller, GenerateRequest, TokenDelta
from commutator.errors import RequestError
from commutator.frontend import Forward
from commutator_openai.fields import hints_given
from commutator_openai.requests import ChatMessage, ChatRequest

HINTS: list[tuple[str, Any]] = [
    ("store", True),
    ("metadata", {"a": "b"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("service_tier", "flex"),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(("name", "value"), HINTS)
async def test_a_hint_is_ignored_and_named_in_a_header(name: str, value: Any) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        body = {"model": MODEL, "messages": MESSAGES}
        for more in ({}, {"stream": True}):
            sent = {**body, **more, name: value}
            async with door.session.post(door.url + CHAT, json=sent) as response:
                assert response.status == 200
                assert response.headers["X-Commutator-Ignored"] == name
                await response.read()
            async with door.session.post(door.url + CHAT, json={**body, **more}) as response:
                assert "X-Commutator-Ignored" not in response.headers
                await response.read()
    hinted, plain, *_ = dispatcher.requests
    assert evolve(hinted, request_id="") == evolve(plain, request_id="")


@pytest.mark.parametrize(("name", "value"), HINTS)
async def test_strict_refuses_it(name: str, value: Any) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, strict=True) as door:
        status, body = await door.chat(**{name: value})
        assert (await door.chat())[0] == 200
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported, because ")
    assert error["message"].endswith("Remove it.")
    assert len(dispatcher.requests) == 1


@pytest.mark.parametrize("strict", [False, True])
async def test_values_that_mean_off_are_always_fine(strict: bool) -> None:
    off: dict[str, Any] = {
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "reasoning_effort": None,
    }
    async with (
        front_door(FakeDispatcher(), strict=strict) as door,
        door.session.post(
            door.url + CHAT, json={"model": MODEL, "messages": MESSAGES, **off}
        ) as response,
    ):
        assert response.status == 200
        assert "X-Commutator-Ignored" not in response.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", {"a": 1}),
        ("metadata", {str(number): "" for number in range(17)}),
        ("metadata", ["a"]),
        ("service_tier", "gold"),
        ("verbosity", "endless"),
        ("reasoning_effort", "extra_high"),
    ],
)
async def test_a_wrong_value_is_refused_even_where_it_had_no_effect(name: str, value: Any) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.chat(**{name: value})
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, name, "invalid_value")
    assert not dispatcher.requests


async def test_several_hints_are_named_together() -> None:
    async with front_door(FakeDispatcher()) as door:
        sent: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "service_tier": "flex"}
        async with door.session.post(door.url + "/v1/completions", json=sent) as response:
            assert response.headers["X-Commutator-Ignored"] == "service_tier"
        sent = {"model": MODEL, "messages": MESSAGES, "metadata": {"a": "b"}, "store": True}
        async with door.session.post(door.url + CHAT, json=sent) as response:
            assert set(response.headers["X-Commutator-Ignored"].split(", ")) == {
                "metadata",
                "store",
            }


def test_what_equals_an_off_value_of_another_type_is_a_hint() -> None:
    message = ChatMessage(role="user", content="Hi")
    request = ChatRequest(model="m", messages=(message,), store=0)
    assert list(hints_given(request)) == ["store"]


@define
class ForwardingDispatcher(FakeDispatcher):
    def forwards(self, model: str) -> bool:
        return True

    async def forward(
        self, model: str, request: GenerateRequest, caller: Caller = UNKNOWN_CALLER
    ) -> Forward:
        raise RequestError("passed on")


@pytest.mark.parametrize(
    ("sent", "strict", "passed_on"),
    [
        ({"reasoning_effort": "high"}, False, True),
        ({"reasoning_effort": "high", "store": True}, False, True),
        ({"store": True}, False, False),
        ({"store": True}, True, True),
    ],
)
async def test_an_engine_that_may_know_a_hint_gets_it(
    sent: dict[str, Any], strict: bool, passed_on: bool
) -> None:
    async with front_door(ForwardingDispatcher(), strict=strict) as door:
        status, body = await door.chat(**sent)
    if passed_on:
        assert body["error"]["message"] == "passed on"
    else:
        assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_logprobs_from_an_engine_that_computes_none_are_refused(
    path: str, stream: bool
) -> None:
    def script(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        deltas = answer("Hello there!")(request)
        return [evolve(d, logprobs=()) if isinstance(d, TokenDelta) else d for d in deltas]

    dispatcher = FakeDispatcher(script)
    asked = {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": "Hi"}
    async with front_door(dispatcher) as door:
        status, body = await door.post(path, {"logprobs": 0, "stream": stream, **asked})
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, "logprobs", "unsupported_parameter")
    assert "the engine of this model computes none. Remove it." in error["message"]
    assert dispatcher.open == 0, "the engine's request is aborted"
