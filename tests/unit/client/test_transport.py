"""How often the client sends a request, and what it raises, over scripted connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import pytest

from commutator_client import (
    ApiError,
    AsyncClient,
    Client,
    ClientConfig,
    ClientConnectionError,
    ClientError,
    ClientTimeoutError,
    OverloadedError,
    UnavailableError,
    transport,
)

CONFIG = ClientConfig(base_url="http://door:1/v1/", max_retries=2)
HI = [{"role": "user", "content": "Hi"}]
DONE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}}]}

Step = httpx2.Response | Exception | type[Exception]


class Script:
    """Answers one request after the other; ``waits`` are those between attempts."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx2.Request] = []
        self.waits: list[float] = []

    def next(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        step = self.steps.pop(0)
        if isinstance(step, httpx2.Response):
            return step
        raise step("broken") if isinstance(step, type) else step

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]

    def sleep(self, wait_s: float) -> None:
        self.waits.append(wait_s)

    async def asleep(self, wait_s: float) -> None:
        self.waits.append(wait_s)


def refused(status: int, code: str = "x", **headers: str) -> httpx2.Response:
    error = {"message": "not now", "type": "t", "param": "model", "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, json={"error": error}, headers=named)


def events(*pieces: Any, done: bool = True) -> httpx2.Response:
    text = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
    return httpx2.Response(
        200,
        text=text + ("data: [DONE]\n\n" if done else ""),
        headers={"Content-Type": "text/event-stream"},
    )


def chunk(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What all clients made by a test meet."""
    script = Script()
    make_sync, make_async = transport.sync_openai, transport.async_openai
    over = httpx2.MockTransport(script.next)
    monkeypatch.setattr(
        transport,
        "sync_openai",
        lambda config: make_sync(config, transport=over, sleep=script.sleep),
    )
    monkeypatch.setattr(
        transport,
        "async_openai",
        lambda config: make_async(config, transport=over, sleep=script.asleep),
    )
    return script


Ask = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def chat(request: pytest.FixtureRequest, script: Script) -> Ask:
    """Asks once, whole or streamed, by a client of either kind."""

    async def sync(config: ClientConfig = CONFIG, stream: bool = False) -> Any:
        with Client(config) as client:
            if not stream:
                return client.chat_completion(HI)
            with client.chat_completion(HI, stream=True) as pieces:
                return [*pieces]

    async def by_async(config: ClientConfig = CONFIG, stream: bool = False) -> Any:
        async with AsyncClient(config) as client:
            if not stream:
                return await client.chat_completion(HI)
            return [piece async for piece in await client.chat_completion(HI, stream=True)]

    return sync if request.param == "sync" else by_async


async def test_an_answer_is_what_the_server_said(script: Script, chat: Ask) -> None:
    script.steps = [httpx2.Response(200, json=DONE)]
    assert await chat() == DONE
    (request,) = script.requests
    assert str(request.url) == "http://door:1/v1/chat/completions"
    assert script.bodies() == [{"messages": HI}], "no model: the only one; and no nulls"


async def test_the_default_model_may_be_named(script: Script, chat: Ask) -> None:
    script.steps = [httpx2.Response(200, json=DONE)]
    await chat(ClientConfig(model="m"))
    assert script.bodies() == [{"model": "m", "messages": HI}]


async def test_no_key_of_the_environment_is_sent(
    script: Script, chat: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    script.steps = [httpx2.Response(200, json=DONE)] * 2
    await chat()
    await chat(ClientConfig(api_key="mine"))
    keys = [request.headers["authorization"] for request in script.requests]
    assert keys == ["Bearer unused", "Bearer mine"]
    assert "mine" not in repr(ClientConfig(api_key="mine"))


async def test_it_waits_as_long_as_the_server_asks(script: Script, chat: Ask) -> None:
    script.steps = [
        refused(429, retry_after="7"),
        refused(503, retry_after_ms="300"),
        httpx2.Response(200, json=DONE),
    ]
    assert await chat() == DONE
    first, second = script.waits
    assert 7 <= first <= 8.75
    assert 0.3 <= second <= 0.375
    assert script.bodies() == [{"messages": HI}] * 3


@pytest.mark.parametrize(("status", "kind"), [(429, OverloadedError), (503, UnavailableError)])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_refusal_is_raised(
    script: Script, chat: Ask, status: int, kind: type[ApiError], stream: bool
) -> None:
    script.steps = [
        refused(status, "queue_full", retry_after="2", x_request_id="r1") for _ in range(3)
    ]
    with pytest.raises(kind, match=f"{status}: not now") as caught:
        await chat(stream=stream)
    error = caught.value
    assert (error.attempts, error.status, error.code) == (3, status, "queue_full")
    assert (error.param, error.request_id, error.retry_after_s) == ("model", "r1", 2.0)
    assert json.loads(error.body)["error"]["message"] == "not now"
    assert len(script.waits) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 500, 504])
async def test_what_is_decided_is_raised_at_once(script: Script, chat: Ask, status: int) -> None:
    script.steps = [refused(status)]
    with pytest.raises(ApiError) as caught:
        await chat()
    assert type(caught.value) is ApiError
    assert (caught.value.status, caught.value.attempts) == (status, 1)


async def test_an_error_that_is_no_json_is_told(script: Script, chat: Ask) -> None:
    script.steps = [httpx2.Response(500, text="<h1>Bad</h1>")]
    with pytest.raises(ApiError, match="500: <h1>Bad</h1>") as caught:
        await chat()
    assert caught.value.body == "<h1>Bad</h1>"


@pytest.mark.parametrize(
    "broken", [httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError]
)
async def test_lost_connections_are_made_again(
    script: Script, chat: Ask, broken: type[Exception]
) -> None:
    script.steps = [broken, broken, httpx2.Response(200, json=DONE)]
    assert await chat() == DONE
    script.steps = [broken] * 3
    with pytest.raises(ClientConnectionError, match="http://door:1 cannot be reached, tried 3"):
        await chat()
    assert len(script.requests) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_not_sent_twice(
    script: Script, chat: Ask, stream: bool
) -> None:
    script.steps = [httpx2.ReadTimeout]
    with pytest.raises(ClientTimeoutError, match="silent for") as caught:
        await chat(stream=stream)
    assert caught.value.attempts == 1
    assert f"({'timeout' if stream else 'answer_timeout'})" in str(caught.value)
    allowed = script.requests[0].extensions["timeout"]
    assert allowed == {"connect": 30, "read": 30 if stream else 600, "write": 30, "pool": 30}


async def test_chunks_come_as_they_were_sent(script: Script, chat: Ask) -> None:
    pieces = [chunk("Hel"), chunk("lo", "stop"), {"choices": [], "usage": {"total_tokens": 3}}]
    script.steps = [refused(503), events(*pieces)]
    assert await chat(stream=True) == pieces
    assert script.bodies() == [{"messages": HI, "stream": True}] * 2


@pytest.mark.parametrize(
    "pieces",
    [(), (chunk("Hel"),), (chunk("Hello", "stop"), chunk("Bye", None, 1))],
    ids=["nothing", "no end", "one of two"],
)
@pytest.mark.parametrize("done", [False, True])
async def test_a_stream_without_its_end_is_an_error(
    script: Script, chat: Ask, pieces: Sequence[Any], done: bool
) -> None:
    script.steps = [events(*pieces, done=done)]
    with pytest.raises(ClientConnectionError, match="broke off"):
        await chat(stream=True)
    assert len(script.requests) == 1, "what was read is not generated again"


async def test_an_error_within_a_stream_is_raised(script: Script, chat: Ask) -> None:
    error = {"error": {"message": "the worker was lost", "code": "worker_lost", "param": None}}
    script.steps = [events(chunk("Hel"), error)]
    with pytest.raises(ApiError, match="the worker was lost") as caught:
        await chat(stream=True)
    assert (caught.value.status, caught.value.code) == (200, "worker_lost")


async def test_every_error_is_a_client_error_with_its_attempts(script: Script, chat: Ask) -> None:
    for step in (httpx2.ConnectError("x"), refused(400), httpx2.WriteTimeout("x")):
        script.steps = [step] * 3
        with pytest.raises(ClientError) as caught:
            await chat()
        assert caught.value.attempts >= 1


def test_health_is_asked_once(script: Script) -> None:
    client = Client(CONFIG)
    script.steps = [httpx2.ConnectError("x")]
    with pytest.raises(ClientConnectionError, match="tried once"):
        client.health_check()
    script.steps = [httpx2.Response(200, json={"status": "draining"})]
    assert client.health_check() == {"status": "draining"}
    script.steps = [refused(403), httpx2.Response(200, json={"status": "ok"})]
    assert client.health_check() == {"status": "ready"}
    script.steps = [refused(403), refused(503)]
    assert client.health_check()["status"] == "degraded"
    script.steps = [refused(500)]
    with pytest.raises(ApiError):
        client.health_check()
    urls = [str(request.url) for request in script.requests]
    health, ready = "http://door:1/health", "http://door:1/ready"
    assert urls == [health, health, health, ready, health, ready, health]


def test_a_session_shares_connections_and_is_named_in_headers(script: Script) -> None:
    client = Client(CONFIG)
    script.steps = [httpx2.Response(200, json={"data": []})] * 4
    session = client.session("s1")
    session.list_models()
    session.openai.models.list()
    client.list_models()
    client.session().list_models()
    named = [request.headers.get("x-session-id", "") for request in script.requests]
    assert named[:3] == ["s1", "s1", ""]
    assert len(named[3]) == 32
    assert session.openai._client is client.openai._client


def test_a_closed_client_opens_again(script: Script) -> None:
    client = Client(CONFIG)
    script.steps = [httpx2.Response(200, json={"data": []})] * 2
    client.list_models()
    first = client.openai
    client.close()
    client.list_models()
    assert client.openai is not first
    client.close()
    client.close()


async def test_openai_s_own_calls_are_retried_likewise(script: Script) -> None:
    async with AsyncClient(CONFIG) as client:
        script.steps = [refused(503), httpx2.Response(200, json={"object": "list", "data": []})]
        assert (await client.openai.models.list()).data == []
        assert len(script.waits) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"timeout": 0}, "timeout"),
        ({"answer_timeout": float("nan")}, "answer_timeout"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_a_configuration_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}: expected"):
        ClientConfig(**options)


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_the_address_may_end_in_v1(url: str) -> None:
    assert ClientConfig(url).root_url == "http://a:1"
