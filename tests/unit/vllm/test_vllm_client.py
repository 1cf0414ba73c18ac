"""The client against a server that answers as vLLM does, healthy and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientConnectionResetError, web
from attrs import define, evolve, field

from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator_vllm.client import VllmClient
from commutator_vllm.messages import COMPLETIONS, GENERATE

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4)
)
METRICS = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="7"} 1.0\n'


def events(*payloads: Any) -> bytes:
    texts = [payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads]
    return b"".join(f"data: {text}\n\n".encode() for text in texts)


TOKEN = {"choices": [{"token_ids": [8]}]}
LAST = {"choices": [{"token_ids": [9], "finish_reason": "length"}]}


@define
class FakeVllm:
    """One scripted server."""

    status: int = 200
    message: str = ""
    body: bytes = field(factory=lambda: events(TOKEN, LAST, "[DONE]"))
    healthy: bool = True
    tells_sources: bool = True
    offers_tokens: bool = True
    hangs: bool = False
    asked: list[tuple[str, Any]] = field(factory=list)
    keys: list[str | None] = field(factory=list)
    """The Authorization header of each request."""
    gone: asyncio.Event = field(factory=asyncio.Event)
    """Set when a client closes the connection of a running request."""
    url: str = ""

    def app(self) -> web.Application:
        @web.middleware
        async def note_key(request: web.Request, handler: Any) -> web.StreamResponse:
            self.keys.append(request.headers.get("Authorization"))
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[note_key])
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kv_event_sources", self.sources)
        app.router.add_post(GENERATE, self.generate)
        app.router.add_post(COMPLETIONS, self.generate)
        return app

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})

    async def sources(self, _: web.Request) -> web.Response:
        if not self.tells_sources:
            raise web.HTTPNotFound
        return web.json_response({"0": {"endpoint": "tcp://*:5557"}})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        if request.path == GENERATE and not self.offers_tokens:
            return web.json_response({"error": {"message": "disabled", "code": 403}}, status=403)
        if self.status != 200:
            error = {"message": self.message, "code": self.status}
            return web.json_response({"error": error}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.body)
        if self.hangs:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.gone.set()
                raise
        return response


@pytest_asyncio.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    server = FakeVllm()
    runner = web.AppRunner(server.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def client(vllm: FakeVllm) -> AsyncIterator[VllmClient]:
    made = VllmClient(vllm.url)
    yield made
    await made.close()


async def collect(client: VllmClient, request: GenerateRequest = REQUEST) -> list[TokenDelta]:
    async with aclosing(client.generate(request)) as stream:
        return [delta async for delta in stream]


async def tokens(client: VllmClient) -> list[int]:
    return [token for delta in await collect(client) for token in delta.token_ids]


async def test_learns_what_the_server_is(client: VllmClient) -> None:
    info = await client.start()
    assert (info.version, info.model, info.max_model_len) == ("9.9", "m", 64)
    assert (info.block_size, info.kv_capacity_blocks) == (32, 7)
    assert info.kv_events is not None
    assert info.kv_events.endpoint == "tcp://127.0.0.1:5557"
    assert (await client.load()).kv_capacity_blocks == 7
    await client.check_health()


async def test_routing_may_ask_before_each_request(client: VllmClient, vllm: FakeVllm) -> None:
    """Another server may have started at the address of a lost one."""
    info = await client.start()
    vllm.tells_sources = False
    assert await client.start() is info
    vllm.status, vllm.healthy = 500, False
    with pytest.raises(EngineUnavailableError):
        await collect(client)
    assert (await client.start()).kv_events is None


async def test_where_an_older_server_publishes_is_not_known(
    client: VllmClient, vllm: FakeVllm
) -> None:
    vllm.tells_sources = False
    assert (await client.start()).kv_events is None


async def test_takes_the_other_endpoint_where_one_is_not_offered(
    client: VllmClient, vllm: FakeVllm
) -> None:
    vllm.offers_tokens = False
    await client.start()
    assert await tokens(client) == [8, 9]
    assert await tokens(client) == [8, 9]
    assert [path for path, _ in vllm.asked] == [GENERATE, COMPLETIONS, COMPLETIONS]


@pytest.mark.parametrize(
    ("status", "healthy", "kind"),
    [
        (400, True, RequestError),
        (404, True, RequestError),
        (401, True, EngineError),
        (429, True, EngineOverloadedError),
        (503, True, EngineOverloadedError),
        (503, False, EngineUnavailableError),
        (500, True, EngineError),
        (500, False, EngineUnavailableError),
    ],
)
async def test_full_dead_and_wrong_are_different_errors(
    client: VllmClient, vllm: FakeVllm, status: int, healthy: bool, kind: type[Exception]
) -> None:
    await client.start()
    vllm.status, vllm.healthy, vllm.message = status, healthy, "because"
    with pytest.raises(kind, match="because") as caught:
        await collect(client)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("body", "healthy", "kind"),
    [
        (events(TOKEN), True, EngineIncompleteError),
        (events(TOKEN, {"error": {"message": "x", "code": 400}}), True, RequestError),
        (events(TOKEN, {"error": {"message": "x", "code": 500}}), True, EngineError),
        (events(TOKEN, {"error": {"message": "x", "code": 500}}), False, EngineUnavailableError),
    ],
)
async def test_failures_after_the_first_token(
    client: VllmClient, vllm: FakeVllm, body: bytes, healthy: bool, kind: type[Exception]
) -> None:
    await client.start()
    vllm.body, vllm.healthy = body, healthy
    stream = client.generate(REQUEST)
    assert (await anext(stream)).token_ids == (8,)
    with pytest.raises(kind) as caught:
        await anext(stream)
    assert type(caught.value) is kind


async def test_a_decode_leg_that_did_not_get_the_kv(client: VllmClient, vllm: FakeVllm) -> None:
    await client.start()
    vllm.status, vllm.message = 500, "load failed"
    with pytest.raises(EngineHandoverError, match="load failed"):
        await collect(client, evolve(REQUEST, handover={"do_remote_prefill": True}))
    vllm.healthy = False
    with pytest.raises(EngineUnavailableError):
        await collect(client, evolve(REQUEST, handover={"do_remote_prefill": True}))


async def test_closing_a_stream_closes_the_connection(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.body, vllm.hangs = events(TOKEN), True
    await client.start()
    stream = client.generate(REQUEST)
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(30):
        await vllm.gone.wait()
    assert [delta async for delta in stream] == []


async def test_closing_the_client_ends_its_streams(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.body, vllm.hangs = events(TOKEN), True
    await client.start()
    stream = client.generate(REQUEST)
    await anext(stream)
    await client.close()
    with pytest.raises(EngineUnavailableError):
        await anext(stream)
    async with asyncio.timeout(30):
        await vllm.gone.wait()


async def test_a_server_that_is_not_there() -> None:
    client = VllmClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailableError):
        await client.start()
    with pytest.raises(EngineUnavailableError, match="not connected"):
        await collect(client)
    await client.close()


async def test_a_key_goes_along(vllm: FakeVllm) -> None:
    client = VllmClient(vllm.url, api_key="secret", use_priority=False)
    await client.start()
    await collect(client, evolve(REQUEST, priority=3))
    ((_, body),) = vllm.asked
    assert "priority" not in body
    assert vllm.keys == ["Bearer secret"] * 6
    await client.close()


async def test_a_client_that_is_lost_is_not_the_servers_fault(
    client: VllmClient, vllm: FakeVllm
) -> None:
    info = await client.start()
    vllm.body, vllm.hangs = events(TOKEN), True

    async def relay() -> None:
        async with client.forward(COMPLETIONS, b'{"any": 1}', {}) as answer:
            assert answer.status == 200
            async for data in answer.chunks():
                assert data == events(TOKEN)
                raise ClientConnectionResetError("cannot write")

    with pytest.raises(ClientConnectionResetError):
        await relay()
    assert await client.start() is info
    async with asyncio.timeout(30):
        await vllm.gone.wait()


async def test_answers_that_are_forwarded(client: VllmClient, vllm: FakeVllm) -> None:
    """The client gets a refusal as the answer; routing gets the error of a full server."""
    await client.start()
    async with client.forward(COMPLETIONS, b'{"any": 1}', {"X-Request-Id": "r"}) as answer:
        assert b"".join([data async for data in answer.chunks()]) == vllm.body
    vllm.status, vllm.message = 400, "bad schema"
    async with client.forward(COMPLETIONS, b"{}", {}) as answer:
        assert answer.status == 400
        assert answer.content_type.startswith("application/json")
    vllm.status = 429
    with pytest.raises(EngineOverloadedError):
        async with client.forward(COMPLETIONS, b"{}", {}):
            pass
    assert vllm.asked[0] == (COMPLETIONS, {"any": 1})
    await client.server.close()
    client.server.url = "http://127.0.0.1:9"
    with pytest.raises(EngineUnavailableError):
        async with client.forward(COMPLETIONS, b"{}", {}):
            pass
