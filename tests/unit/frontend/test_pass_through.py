"""What only the engine can do goes to its worker as it came."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import pytest
from aiohttp import ClientPayloadError
from attrs import define, field
from tests.support.front_door import (
    MODEL,
    TEXT,
    FakeDispatcher,
    engine_info,
    fallback_route,
    front_door,
)

from commutator.auth.gate import Gate
from commutator.contract.principal import (
    Authenticator,
    Credentials,
    Limits,
    Principal,
    PrincipalConfig,
)
from commutator.contract.request import UNKNOWN_CALLER, Caller, GenerateRequest
from commutator.contract.worker import EngineInfo
from commutator.errors import EngineUnavailableError
from commutator.frontend import Forward
from commutator.routing.router import Route

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@define
class FakeForward:
    """A worker that answers two chunks, and calls the model otherwise."""

    dispatcher: ForwardingDispatcher
    worker_id: str = "w-1"
    info: EngineInfo = engine_info(model="org/model", forwards=True)
    status: int = 201
    route: Route = fallback_route("w-1", overlap_blocks=3, best_overlap_blocks=4, blocks=6)

    @property
    def content_type(self) -> str:
        return self.dispatcher.content_type

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Self:
        if self.dispatcher.dead:
            raise EngineUnavailableError("gone")
        self.dispatcher.sent.append((path, json.loads(body), dict(headers)))
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.dispatcher.pieces[:-1]:
            yield piece
        if self.dispatcher.dies is not None:
            raise self.dispatcher.dies
        await asyncio.sleep(self.dispatcher.pause_s)
        yield self.dispatcher.pieces[-1]

    async def __aenter__(self) -> Self:
        self.dispatcher.open += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dispatcher.open -= 1
        self.dispatcher.seen.append(error)


@define
class ForwardingDispatcher(FakeDispatcher):
    takes: bool = True
    code: int = 201
    dead: bool = False
    dies: Exception | None = None
    """While it answers."""
    pause_s: float = 0.0
    """Between the chunks of an answer."""
    content_type: str = "text/event-stream"
    pieces: Sequence[bytes] = (b"data: one\n\n", b"data: two\n\n")
    """The answer."""
    seen: list[BaseException | None] = field(factory=list)
    """What ended the answers."""
    sent: list[tuple[str, Any, dict[str, str]]] = field(factory=list)
    routed_by: list[tuple[Sequence[int], str | None]] = field(factory=list)
    requests: list[GenerateRequest] = field(factory=list)

    def forwards(self, model: str) -> bool:
        return self.takes

    async def forward(
        self, model: str, request: GenerateRequest, caller: Caller = UNKNOWN_CALLER
    ) -> Forward:
        self.routed_by.append((list(request.token_ids), caller.session_id))
        self.requests.append(request)
        return cast("Forward", FakeForward(self, status=self.code))


async def test_tools_are_the_engines_business() -> None:
    dispatcher = ForwardingDispatcher(block_size=16)
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": True}
    async with (
        front_door(dispatcher) as door,
        door.session.post(
            f"{door.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"}
        ) as answer,
    ):
        assert answer.status == 201
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["X-Commutator-Worker"] == "w-1"
        assert await answer.read() == b"data: one\n\ndata: two\n\n"
    assert dispatcher.sent == [
        ("/v1/chat/completions", {**body, "model": "org/model"}, {"X-Request-Id": "mine"})
    ]
    assert dispatcher.open == 0


async def test_it_is_routed_by_the_prompt_that_can_be_rendered() -> None:
    dispatcher = ForwardingDispatcher(block_size=16)
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with front_door(dispatcher) as door:
        await door.session.post(
            f"{door.url}/v1/chat/completions",
            json={"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "session_id": "s"},
        )
        await door.session.post(
            f"{door.url}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": picture}]},
        )
    told, untold = dispatcher.routed_by
    expected = TEXT.encode(TEXT.chat_prompt(MESSAGES).text, add_special_tokens=False)
    assert told == (expected, "s")
    assert untold == ([], None)


async def test_its_decision_is_shown_and_counted_as_any_other() -> None:
    dispatcher = ForwardingDispatcher(block_size=16)
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    async with front_door(dispatcher) as door:
        explained = {"X-Commutator-Explain": "1"}
        url = f"{door.url}/v1/chat/completions"
        async with door.session.post(url, json=body, headers=explained) as answer:
            assert (
                json.loads(answer.headers["X-Commutator-Decision"])["reason"] == "the policy failed"
            )
        async with door.session.post(url, json=body) as answer:
            assert "X-Commutator-Decision" not in answer.headers
        async with door.session.get(f"{door.url}/metrics") as answer:
            page = await answer.text()
    assert f'commutator_router_fallbacks_total{{model="{MODEL}"}} 2.0' in page


async def test_priority_and_salt_are_known_to_routing() -> None:
    dispatcher = ForwardingDispatcher(block_size=16)
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    async with front_door(dispatcher) as door:
        url = f"{door.url}/v1/chat/completions"
        await door.session.post(url, json={**body, "priority": -3, "cache_salt": "tenant"})
        async with door.session.post(url, json={**body, "priority": "high"}) as answer:
            assert answer.status == 400
    (request,) = dispatcher.requests
    assert (request.priority, request.cache_salt) == (-3, "tenant")


@pytest.mark.security
@pytest.mark.parametrize(
    "hidden",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "attacker.example"}},
        {"ec_transfer_params": {}},
        {"disaggregated_params": {}},
        {"vllm_xargs": {}},
        {"bootstrap_host": "attacker.example", "bootstrap_room": 1},
        {"rid": "another-request"},
        {"chat_template": "{{ 1 }}"},
        {"n": 10**6},
        {"priority": -(10**30)},
    ],
    ids="+".join,
)
async def test_what_no_client_may_send_is_refused_beside_what_the_engine_serves(
    hidden: dict[str, Any],
) -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher) as door:
        status, body = await door.chat(tools=TOOLS, **hidden)
        assert (status, body["error"]["param"]) == (400, next(iter(hidden)))
        status, _ = await door.post("/v1/completions", {"prompt": "a", "suffix": "b", **hidden})
        assert status == 400
        if not {"n", "priority"} & hidden.keys():
            status, _ = await door.post("/v1/embeddings", {"input": "a", **hidden})
            assert status == 400
    assert not dispatcher.sent


@pytest.mark.security
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_what_engines_say_of_themselves_does_not_reach_the_client(content_type: str) -> None:
    told = {"id": "1", "choices": [{"text": "kv_transfer_params"}]}
    secret = {"kv_transfer_params": {"remote_host": "10.0.0.7"}, "disaggregated_params": {}}
    line = json.dumps(told | secret)
    said = line if content_type == "application/json" else f"data: {line}\n\ndata: [DONE]\n\n"
    pieces = [said[start : start + 7].encode() for start in range(0, len(said), 7)]
    dispatcher = ForwardingDispatcher(content_type=content_type, pieces=pieces)
    async with front_door(dispatcher) as door:
        url = f"{door.url}/v1/chat/completions"
        body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
        async with door.session.post(url, json=body) as answer:
            first, _, rest = (await answer.text()).removeprefix("data: ").partition("\n")
    assert json.loads(first) == told
    assert rest in ("", "\ndata: [DONE]\n\n")


async def test_a_later_turn_of_a_tool_call_goes_the_same_way() -> None:
    dispatcher = ForwardingDispatcher(block_size=16)
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    async with front_door(dispatcher) as door:
        await door.session.post(
            f"{door.url}/v1/chat/completions", json={"model": MODEL, "messages": messages}
        )
    assert dispatcher.sent[0][1]["messages"] == messages


async def test_what_is_served_here_is_not_passed_on() -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher) as door:
        status, _ = await door.chat(max_tokens=5)
        assert status == 200
        status, _ = await door.chat(max_tokens=-1)
        assert status == 400
        status, _ = await door.chat(odd=1)
        assert status == 200
    assert not dispatcher.sent


async def test_engines_that_take_no_such_requests() -> None:
    async with front_door(ForwardingDispatcher(takes=False)) as door:
        status, body = await door.chat(tools=TOOLS)
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        status, body = await door.post("/v1/embeddings", {"input": "x"})
        assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_endpoints_of_the_engine(path: str) -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher) as door:
        answer = await door.session.post(f"{door.url}{path}", json={"model": MODEL, "input": "x"})
        assert answer.status == 201
        status, body = await door.post(path, {"model": "nobody"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert [(sent[0], sent[1]) for sent in dispatcher.sent] == [
        (path, {"model": "org/model", "input": "x"})
    ]


async def test_a_worker_that_is_lost() -> None:
    dispatcher = ForwardingDispatcher(dead=True)
    async with front_door(dispatcher) as door:
        status, body = await door.chat(tools=TOOLS)
        assert (status, body["error"]["code"]) == (503, "worker_lost")
    assert dispatcher.open == 0


FAILURES = [
    (EngineUnavailableError("gone"), 503, "worker_lost"),
    (RuntimeError("a bug"), 500, "internal_error"),
    (None, 504, "deadline_exceeded"),
]


@pytest.mark.parametrize(("dies", "status", "code"), FAILURES, ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_what_fails_while_it_answers_ends_the_stream(
    dies: Exception | None, status: int, code: str, path: str
) -> None:
    dispatcher = ForwardingDispatcher(dies=dies, pause_s=9)
    prompt = "input" if path == "/v1/responses" else "messages"
    body = {"model": MODEL, prompt: MESSAGES, "tools": TOOLS}
    async with front_door(dispatcher, request_timeout_s=0.2) as door:
        async with door.session.post(f"{door.url}{path}", json=body) as answer:
            first, last, _ = (await answer.read()).split(b"\n\n")
        metrics = door.services.metrics.render().decode()
    assert first == b"data: one"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
    assert f'code="{status}",endpoint="{path}",model="{MODEL}"}} 1.0' in metrics
    assert dispatcher.open == 0
    assert dispatcher.seen != [None], "routing hears of it"


@pytest.mark.parametrize(("dies", "status", "code"), FAILURES, ids=str)
async def test_what_is_no_stream_ends_without_its_end(
    dies: Exception | None, status: int, code: str
) -> None:
    dispatcher = ForwardingDispatcher(dies=dies, pause_s=9, content_type="application/json")
    async with front_door(dispatcher, request_timeout_s=0.2) as door:
        url = f"{door.url}/v1/embeddings"
        async with door.session.post(url, json={"model": MODEL, "input": "x"}) as answer:
            with pytest.raises(ClientPayloadError):
                await answer.read()
        metrics = door.services.metrics.render().decode()
    assert f'code="{status}",endpoint="/v1/embeddings",model="{MODEL}"}} 1.0' in metrics


BODY = json.dumps({"model": MODEL, "input": "x"}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        (BODY, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (b"junk", {**JSON, "Content-Encoding": "gzip"}, 400, "invalid_body"),
        (b"junk", JSON, 400, "invalid_json"),
        (b"[]", JSON, 400, "invalid_json"),
        (b'{"model": ["smol"]}', JSON, 400, "invalid_value"),
        (b'{"model": "' + b"m" * 70_000 + b'"}', JSON, 413, "body_too_large"),
    ],
    ids=["text", "gzip", "junk", "list", "model", "length"],
)
async def test_bodies_for_the_engine_are_read_as_all_others(
    data: bytes,
    headers: dict[str, str],
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher, max_body_bytes=60_000) as door:
        url = f"{door.url}/v1/embeddings"
        async with door.session.post(url, data=data, headers=headers) as answer:
            body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (status, code)
    assert not dispatcher.sent
    assert not caplog.records


async def test_a_slow_body_counts_against_the_deadline() -> None:
    async with front_door(ForwardingDispatcher(), request_timeout_s=0.1) as door:
        assert b"504" in await door.status_line_for_unfinished_body("/v1/embeddings")


async def test_long_bodies_are_parsed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noting(data: bytes) -> Any:
        threads.append(threading.current_thread())
        return msgspec.json.Decoder().decode(data)

    monkeypatch.setattr(msgspec.json, "decode", noting)
    async with front_door(ForwardingDispatcher()) as door:
        for length in (10, 100_000):
            body = {"model": MODEL, "input": "x" * length}
            await door.session.post(f"{door.url}/v1/embeddings", json=body)
    short, long = threads
    assert short is threading.main_thread()
    assert long is not short


async def test_what_routing_cannot_use_of_a_body_is_for_the_engine_alone() -> None:
    dispatcher = ForwardingDispatcher()
    wrong = [
        {"session_id": ["a"], "priority": True},
        {"session_id": 7, "prompt_cache_key": "key", "priority": 10**40},
    ]
    async with front_door(dispatcher) as door:
        for body in wrong:
            url = f"{door.url}/v1/embeddings"
            await door.session.post(url, json={"model": MODEL, "input": "x", **body})
    assert [session for _, session in dispatcher.routed_by] == [None, "key"]
    assert [request.priority for request in dispatcher.requests] == [0, 0]
    assert all(type(request.priority) is int for request in dispatcher.requests)
    assert dispatcher.sent[0][1]["session_id"] == ["a"], "the engine has its own opinion"


class OneKey(Authenticator):
    """Everyone is the same principal."""

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        limits = Limits(answers=2, max_model_len=64)
        return PrincipalConfig(limits=limits).principal("alice")


@pytest.mark.security
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "suffix": "z", "n": 2}),
        ("/v1/completions", {"prompt": "a", "suffix": "z", "n": 3}),
        ("/v1/completions", {"prompt": "a", "suffix": "z", "max_tokens": 65}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "priority": -1}),
        ("/v1/embeddings", {"input": "a", "priority": -1}),
        ("/v1/embeddings", {"input": "a", "priority": -1.0}),
        ("/v1/embeddings", {"input": "a", "priority": "-1"}),
        ("/v1/embeddings", {"input": "a", "priority": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 65}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 65.0}),
        ("/v1/responses", {"input": "a", "max_output_tokens": "65"}),
    ],
)
async def test_what_passes_through_stays_within_the_rights_however_it_is_written(
    path: str, more: dict[str, Any]
) -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher, gate=Gate([("one_key", OneKey())])) as door:
        assert (await door.post(path, more))[0] == 400
        assert not dispatcher.sent
        asked = {name: more[name] for name in more.keys() & {"prompt", "messages", "input"}}
        within: dict[str, Any] = {"suffix": "z"} if "prompt" in more else {"tools": TOOLS}
        if "input" in more:
            within = {"priority": 3}
        body = {"model": MODEL, **asked, **within}
        async with door.session.post(door.url + path, json=body) as answer:
            assert answer.status == 201, await answer.text()
    ((_, sent, _),) = dispatcher.sent
    assert sent["cache_salt"] == "principal/alice"


REFUSALS: list[tuple[int, Any, tuple[int, str, str | None, str]]] = [
    (
        400,
        {"error": {"message": "no such tool", "type": "BadRequestError", "param": "tools"}},
        (400, "engine_refused", "tools", "no such tool"),
    ),
    (404, {"detail": "Not Found"}, (404, "engine_refused", None, "Not Found")),
    (422, {"object": "error", "message": "odd"}, (422, "engine_refused", None, "odd")),
    (400, "plain", (400, "engine_refused", None, "plain")),
    (500, {"error": {"message": "secret traceback"}}, (500, "worker_failed", None, "see the log")),
]


@pytest.mark.parametrize(("status", "theirs", "ours"), REFUSALS)
async def test_errors_of_engines_have_our_shape(
    status: int, theirs: Any, ours: tuple[int, str, str | None, str]
) -> None:
    body = theirs.encode() if isinstance(theirs, str) else json.dumps(theirs).encode()
    dispatcher = ForwardingDispatcher(
        code=status, content_type="application/json", pieces=[body[:5], body[5:]]
    )
    async with front_door(dispatcher) as door:
        got, told = await door.chat(tools=TOOLS)
    error = told["error"]
    assert (got, error["code"], error["param"]) == ours[:3]
    assert ours[3] in error["message"]
    assert "secret" not in error["message"]


async def test_so_have_those_within_streams() -> None:
    events = [
        {"choices": [{"delta": {"content": '"error"'}}]},
        {"error": {"message": "no room", "type": "BadRequestError", "code": 400}},
    ]
    pieces = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
    dispatcher = ForwardingDispatcher(content_type="text/event-stream", pieces=pieces)
    async with front_door(dispatcher) as door:
        body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": True}
        url = door.url + "/v1/chat/completions"
        async with door.session.post(url, json=body) as response:
            first, second = (await response.read()).decode().strip().split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == events[0]
    told = json.loads(second.removeprefix("data: "))["error"]
    assert (told["message"], told["code"]) == ("no room", "engine_refused")
