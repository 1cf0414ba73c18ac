"""The client against a server that answers as SGLang does, healthy and not."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from attrs import define, evolve, field

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    Pooling,
    SamplingParams,
    TokenDelta,
)
from commutator.contract.worker import EventSource
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineIncompleteError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator_engine_kit.http import HttpServer
from commutator_sglang.client import SglangClient

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4)
)
IN_A_ROOM = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}


def events(*payloads: Any) -> bytes:
    return b"".join(f"data: {json.dumps(payload)}\n\n".encode() for payload in payloads)


def tokens_of(ids: list[int], done: int, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"completion_tokens": done, "finish_reason": reason}}


FIRST = tokens_of([8], 1)
LAST = tokens_of([9], 2, {"type": "length", "length": 2})
ABORTED = tokens_of([], 1, {"type": "abort", "message": "by name"})


@define
class FakeSglang:
    """One scripted server."""

    status: int = 200
    body: bytes = field(factory=lambda: events(FIRST, LAST))
    alive: bool = True
    mode: str = "null"
    events_config: str | None = None
    generates: bool = True
    hangs: bool = False
    forgetful: int = 0
    """How many aborts the server ignores."""
    asked: list[Any] = field(factory=list)
    aborted: list[str] = field(factory=list)
    heard: asyncio.Event = field(factory=asyncio.Event)
    gone: asyncio.Event = field(factory=asyncio.Event)
    """Set when a running request has ended."""
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/v1/embeddings", self.embed)
        return app

    async def embed(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "because"}}, status=self.status)
        rows = [
            {"index": number, "embedding": b64encode(struct.pack("<2f", number, 0.5)).decode()}
            for number, _ in enumerate(self.asked[-1]["input"])
        ]
        return web.json_response({"data": rows[::-1]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.alive else 503)

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({
            "version": "9.9", "page_size": 16, "max_total_num_tokens": 160, "max_req_input_len": 99,
            "disaggregation_mode": self.mode, "disaggregation_bootstrap_port": 8998,
            "disaggregation_transfer_backend": "nixl", "kv_events": None, "another": {"a": 1},
            "kv_events_config": self.events_config,
        })  # fmt: skip

    async def model_info(self, _: web.Request) -> web.Response:
        answer = {"served_model_name": "m", "is_generation": self.generates}
        return web.json_response(answer, status=200 if self.alive else 500)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 2, "num_used_tokens": 17}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "because"}}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await response.write(self.body)
            if self.hangs:
                await self.heard.wait()
                await response.write(events(ABORTED))
        finally:
            self.gone.set()
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        if len(self.aborted) > self.forgetful:
            self.heard.set()
        return web.Response()


@pytest_asyncio.fixture
async def sglang() -> AsyncIterator[FakeSglang]:
    server = FakeSglang()
    runner = web.AppRunner(server.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def client(sglang: FakeSglang) -> AsyncIterator[SglangClient]:
    made = SglangClient(sglang.url)
    yield made
    await made.close()


async def collect(client: SglangClient, request: GenerateRequest = REQUEST) -> list[TokenDelta]:
    async with aclosing(client.generate(request)) as stream:
        return [delta async for delta in stream]


async def test_learns_what_the_server_is(client: SglangClient, sglang: FakeSglang) -> None:
    info = await client.start()
    assert (info.version, info.model, info.max_model_len) == ("9.9", "m", 64)
    assert info.computes_prompts
    assert (info.block_size, info.kv_capacity_blocks, info.handover) == (16, 10, None)
    load = await client.load()
    assert (load.running, load.kv_used_blocks, load.kv_capacity_blocks) == (2, 2, 10)
    await client.check_health()
    sglang.alive = False
    with pytest.raises(EngineUnavailableError):
        await client.check_health()


@pytest.mark.security
async def test_events_on_unix_sockets_of_this_machine_are_found(
    client: SglangClient, sglang: FakeSglang, tmp_path: Path
) -> None:
    path = tmp_path / "events"
    config = {"publisher": "zmq", "endpoint": f"ipc://{path}", "replay_endpoint": "ipc:///r"}
    sglang.events_config = json.dumps(config)
    assert (await client.discover()).kv_events is None, "the server is on another machine"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        found = (await client.discover()).kv_events
    assert found == EventSource(endpoint=f"ipc://{path}", replay_endpoint="ipc:///r")


async def test_tokens_come_out(client: SglangClient, sglang: FakeSglang) -> None:
    await client.start()
    deltas = await collect(client)
    assert [token for delta in deltas for token in delta.token_ids] == [8, 9]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert sglang.asked[0]["rid"].endswith("-r")
    assert not sglang.aborted


@pytest.mark.parametrize(
    ("status", "alive", "kind"),
    [
        (400, True, RequestError),
        (401, True, EngineError),
        (429, True, EngineOverloadedError),
        (503, True, EngineOverloadedError),
        (503, False, EngineUnavailableError),
        (500, True, EngineError),
        (500, False, EngineUnavailableError),
    ],
)
async def test_full_dead_and_wrong_are_different_errors(
    client: SglangClient, sglang: FakeSglang, status: int, alive: bool, kind: type[Exception]
) -> None:
    await client.start()
    sglang.status, sglang.alive = status, alive
    with pytest.raises(kind, match="because") as caught:
        await collect(client)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (events(FIRST), EngineIncompleteError),
        (events(FIRST, {"error": {"message": "x", "code": 400}}), RequestError),
        (events(FIRST, {"error": {"message": "x", "code": 500}}), EngineError),
    ],
)
async def test_failures_after_the_first_token(
    client: SglangClient, sglang: FakeSglang, body: bytes, kind: type[Exception]
) -> None:
    await client.start()
    sglang.body = body
    stream = client.generate(REQUEST)
    assert (await anext(stream)).token_ids == (8,)
    with pytest.raises(kind) as caught:
        await anext(stream)
    assert type(caught.value) is kind


async def test_an_abort_is_repeated_until_it_is_heeded(
    client: SglangClient, sglang: FakeSglang
) -> None:
    sglang.body, sglang.hangs, sglang.forgetful = events(FIRST), True, 2
    await client.start()
    stream = client.generate(REQUEST)
    await anext(stream)
    await stream.aclose()
    assert [delta async for delta in stream] == []
    async with asyncio.timeout(30):
        await sglang.gone.wait()
    assert set(sglang.aborted) == {sglang.asked[0]["rid"]}


async def test_an_abort_is_sent_in_the_next_turn_of_the_event_loop(
    client: SglangClient, sglang: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes first, so that the server of the other request is not kept waiting."""
    sglang.body, sglang.hangs, sent = events(FIRST), True, list[str]()
    await client.start()
    stream = client.generate(REQUEST)
    await anext(stream)
    ask = HttpServer.ask

    async def noted(server: HttpServer, path: str, **options: Any) -> bytes:
        sent.append(path)
        return await ask(server, path, **options)

    monkeypatch.setattr(HttpServer, "ask", noted)
    await stream.aclose()
    await asyncio.sleep(0)
    assert sent == ["/abort_request"]
    async with asyncio.timeout(30):
        await sglang.gone.wait()


async def test_how_long_a_leg_runs_after_its_abort_is_logged(
    client: SglangClient, sglang: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    sglang.mode, sglang.body, sglang.hangs = "prefill", events(FIRST), True
    await client.start()
    with caplog.at_level(logging.INFO, "commutator_sglang"):
        stream = client.generate(evolve(REQUEST, handover=IN_A_ROOM))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(30):
            while "ms after its abort" not in caplog.text:
                await asyncio.sleep(0.01)
    assert f"disaggregated request {sglang.asked[0]['rid']} ended " in caplog.text


async def test_closing_the_client_aborts_what_runs(
    client: SglangClient, sglang: FakeSglang
) -> None:
    sglang.body, sglang.hangs = events(FIRST), True
    await client.start()
    stream = client.generate(REQUEST)
    await anext(stream)
    await client.close()
    assert sglang.aborted == [sglang.asked[0]["rid"]]
    with pytest.raises(EngineUnavailableError, match="closed"):
        await anext(stream)


async def test_no_name_begins_another(client: SglangClient, sglang: FakeSglang) -> None:
    """SGLang aborts every request whose id begins with the given one."""
    await client.start()
    for name in ("a", "a", "ab"):
        await collect(client, evolve(REQUEST, request_id=name))
    rids = [body["rid"] for body in sglang.asked]
    assert not [1 for one in rids for other in rids if one != other and other.startswith(one)]
    assert len(set(rids)) == 3


async def test_a_leg_that_does_not_get_the_kv(client: SglangClient, sglang: FakeSglang) -> None:
    sglang.mode, sglang.status = "decode", 500
    info = await client.start()
    assert info.handover is not None
    assert info.handover.address == "127.0.0.1:8998"
    patient = {**IN_A_ROOM, "answer_within_s": 60.0}
    with pytest.raises(EngineHandoverError, match="because"):
        await collect(client, evolve(REQUEST, handover=patient))
    sglang.status, sglang.hangs, sglang.body = 200, True, b""
    hurried = {**IN_A_ROOM, "answer_within_s": 0.05}
    with pytest.raises(EngineHandoverError, match=r"within 0.05 s"):
        await collect(client, evolve(REQUEST, handover=hurried))
    assert sglang.aborted == [sglang.asked[-1]["rid"]]
    assert "answer_within_s" not in sglang.asked[-1]


async def test_a_server_of_one_role_serves_nothing_alone(
    client: SglangClient, sglang: FakeSglang
) -> None:
    sglang.mode = "decode"
    assert not (await client.start()).computes_prompts
    with pytest.raises(EngineNeedsPrefillError, match="kind: always"):
        await collect(client)
    with pytest.raises(EngineHandoverError, match="is prefill"):
        await collect(client, evolve(REQUEST, handover=IN_A_ROOM))
    assert not sglang.asked


async def test_a_server_that_is_not_there() -> None:
    client = SglangClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailableError):
        await client.start()
    with pytest.raises(EngineUnavailableError, match="not connected"):
        await collect(client)
    await client.close()


async def test_answers_that_are_forwarded(client: SglangClient, sglang: FakeSglang) -> None:
    """The client gets a refusal as the answer; routing gets the error of a full server."""
    await client.start()
    async with client.forward("/generate", b'{"any": 1}', {}) as answer:
        assert b"".join([data async for data in answer.chunks()]) == sglang.body
    sglang.status = 400
    async with client.forward("/generate", b"{}", {}) as answer:
        assert answer.status == 400
    sglang.status = 429
    with pytest.raises(EngineOverloadedError):
        async with client.forward("/generate", b"{}", {}):
            pass
    assert sglang.asked[0] == {"any": 1}


async def test_vectors_of_a_server_that_embeds(sglang: FakeSglang) -> None:
    sglang.generates = False
    client = SglangClient(sglang.url)
    try:
        assert (await client.start()).operations == ("embed",)
        pooling = Pooling(operation="embed", lengths=(2, 1), dimensions=2)
        request = evolve(REQUEST, pooling=pooling)
        (delta,) = [one async for one in client.generate(request)]
        assert struct.unpack("<4f", delta.vectors) == (0.0, 0.5, 1.0, 0.5)
        assert delta.finish_reason is FinishReason.STOP
        assert sglang.asked == [
            {
                "model": "m",
                "input": [[1, 2], [3]],
                "encoding_format": "base64",
                "dimensions": 2,
            }
        ]
        bare = evolve(request, pooling=evolve(pooling, activation=False))
        with pytest.raises(RequestError, match="decides itself"):
            [one async for one in client.generate(bare)]
        sglang.status = 400
        with pytest.raises(RequestError, match="because"):
            [one async for one in client.generate(request)]
    finally:
        await client.close()
