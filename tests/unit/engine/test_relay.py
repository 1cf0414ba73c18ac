"""The relay: a port for other hosts before an engine's own HTTP server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from attrs import define, evolve, field
from tests.support.certificates import Authorities, on_a_network
from tests.unit.trust.test_rights_by_kind import OURS, refused, until
from tests.unit.trust.test_tls_wire import KINDS, stranger_contexts
from tests.unit.vllm.test_vllm_client import REQUEST, FakeVllm, events
from yarl import URL

from commutator.contract.engine import RelayStart
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import EngineError, EngineUnavailableError
from commutator.supervisor.worker_agent import relayed_address
from commutator.trust import Network, RunSecret, TlsFiles, adopt
from commutator.trust.identity import Kind
from commutator_engine_kit.http import INSTANCE_HEADER, REFUSED_PATH
from commutator_engine_kit.launching import api_key_at
from commutator_engine_kit.relay import SERVICE, RelayServer
from commutator_vllm.client import PATHS, VllmClient
from commutator_vllm.messages import GENERATE

INFO = EngineInfo(
    kind="vllm", version="1", model="m", max_model_len=64, block_size=16, kv_capacity_blocks=8
)
RECORD = WorkerRecord(
    worker_id="h1-w-0",
    engine="w",
    kind="vllm",
    model="m",
    address="-",
    info=INFO,
    instance="now",
    host="h1",
)
CHAT = "/v1/chat/completions"


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@pytest.fixture
def host(authorities: Authorities, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is host h1, of the run of OURS, and logs each refusal."""
    monkeypatch.setattr("commutator.trust.refusals._refusals._quiet_until_s", {})
    monkeypatch.setattr("commutator_engine_kit.http.is_loopback", lambda _: False)
    with adopt(OURS), on_a_network(monkeypatch, authorities.network("h1")):
        yield


@define
class Engine(FakeVllm):
    """Keeps the headers of what was asked, and sends the rest of an answer when told."""

    seen: list[Mapping[str, str]] = field(factory=list)
    go_on: asyncio.Event = field(factory=asyncio.Event)

    def app(self) -> web.Application:
        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            self.seen.append(request.headers.copy())
            answer: web.StreamResponse = await handler(request)
            return answer

        app = super().app()
        app.middlewares.append(note)
        app.router.add_post(CHAT, self.chat)
        app.router.add_post("/reset_prefix_cache", self.health)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"first")
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        await response.write(b"second")
        return response


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with serving(Engine()) as server:
        yield server


@asynccontextmanager
async def serving(server: Engine) -> AsyncIterator[Engine]:
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def relaying(target: str, *, tls: bool = True, **options: Any) -> AsyncIterator[str]:
    """The address of a relay before the server at ``target``."""
    probe = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()
    address = relayed_address(target, "127.0.0.1", port, tls=tls)
    start = RelayStart("127.0.0.1", port, address, target, PATHS)
    relay = RelayServer(start, instance="now", **options)
    await relay.start(start.listen, start.port)
    try:
        yield address
    finally:
        await relay.stop()


@asynccontextmanager
async def client_at(
    address: str, record: WorkerRecord = RECORD, key: str | None = None
) -> AsyncIterator[VllmClient]:
    """As a front door of the cluster has one."""
    client = VllmClient(address, api_key=key or api_key_at(address), of_cluster=True)
    client.expect(record)
    try:
        yield client
    finally:
        await client.close()


async def test_requests_streams_and_passed_on_bodies(host: None, engine: Engine) -> None:
    async with relaying(engine.url) as address, client_at(address) as client:
        info = await client.start()
        assert (info.model, info.version) == ("m", "9.9")
        tokens = [token async for delta in client.generate(REQUEST) for token in delta.token_ids]
        assert tokens == [8, 9]
        await client.check_health()
        assert engine.asked[-1][1]["token_ids"] == [1, 2, 3]
        key = f"Bearer {api_key_at(engine.url)}"
        assert {headers["Authorization"] for headers in engine.seen} == {key}, "the engine's own"
        assert all(INSTANCE_HEADER not in headers for headers in engine.seen)
        async with client.forward(CHAT, b'{"x": 1}', {"X-Request-Id": "r-1"}) as answer:
            chunks = answer.chunks()
            assert await anext(chunks) == b"first", "before the engine has sent the rest"
            engine.go_on.set()
            assert b"".join([piece async for piece in chunks]) == b"second"
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert engine.asked[-1] == (CHAT, {"x": 1})
        assert engine.seen[-1]["X-Request-Id"] == "r-1"
        assert (await client.refused_connections())[SERVICE] == refused(SERVICE)


def test_its_process_runs_on_uvloop_as_front_doors_do(host: None) -> None:
    async def generated() -> list[int]:
        async with (
            serving(Engine()) as engine,
            relaying(engine.url) as address,
            client_at(address) as client,
        ):
            await client.start()
            return [token async for delta in client.generate(REQUEST) for token in delta.token_ids]

    assert uvloop.run(generated()) == [8, 9]


async def test_who_goes_away_aborts_the_request(host: None, engine: Engine) -> None:
    engine.hangs, engine.body = True, events({"choices": [{"token_ids": [8]}]})
    async with relaying(engine.url) as address, client_at(address) as client:
        await client.start()
        async with aclosing(client.generate(REQUEST)) as stream:
            assert list((await anext(stream)).token_ids) == [8]
        async with asyncio.timeout(10):
            await engine.gone.wait()
        engine.gone.clear()
        async with client.forward(CHAT, b"{}", {}) as answer:
            assert await anext(answer.chunks()) == b"first"
        async with asyncio.timeout(10):
            await engine.gone.wait()


async def test_an_answer_that_breaks_off_is_no_whole_one(host: None) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with relaying(f"http://127.0.0.1:{port}") as address, client_at(address) as client:
        client._info = INFO
        with pytest.raises(EngineUnavailableError):
            async with client.forward(CHAT, b"{}", {}) as answer:
                [piece async for piece in answer.chunks()]
    server.close()


async def test_an_engine_that_is_gone_is_unavailable(host: None, engine: Engine) -> None:
    async with relaying("http://127.0.0.1:9") as address, client_at(address) as client:
        with pytest.raises(EngineUnavailableError, match="the engine cannot be reached"):
            await client.start()
        client._info = INFO
        with pytest.raises(EngineUnavailableError):
            async with client.forward(CHAT, b"{}", {}):
                pass
        with pytest.raises(EngineUnavailableError):
            await anext(client.generate(REQUEST))


@pytest.mark.security
async def test_requests_reach_only_the_relay_of_the_workers_host(
    host: None, engine: Engine
) -> None:
    async with (
        relaying(engine.url) as address,
        client_at(address, evolve(RECORD, host="h2")) as client,
    ):
        client._info = INFO
        with pytest.raises(EngineUnavailableError, match="cannot be reached"):
            await anext(client.generate(REQUEST))
    assert not engine.asked


@asynccontextmanager
async def session_of(
    authorities: Authorities, address: str, files: TlsFiles | None, key: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Somebody with certificates, and the run's key for this address."""
    context = authorities.context(files)
    key = api_key_at(address) if key is None else key
    async with aiohttp.ClientSession(
        address,
        connector=aiohttp.TCPConnector(ssl=context),
        headers={"Authorization": f"Bearer {key}"},
    ) as session:
        yield session


@pytest.mark.security
@pytest.mark.parametrize(
    ("kind", "name", "method", "path", "status"),
    [
        (Kind.HOST, "h2", "POST", GENERATE, 200),
        (Kind.HOST, "h2", "POST", "/reset_prefix_cache", 200),
        (Kind.FRONTEND, "h2", "POST", GENERATE, 200),
        (Kind.FRONTEND, "h2", "GET", "/metrics", 200),
        (Kind.FRONTEND, "h2", "GET", f"{REFUSED_PATH}", 200),
        (Kind.FRONTEND, "h2", "POST", "/reset_prefix_cache", 403),
        (Kind.FRONTEND, "h2", "POST", "/%72eset_prefix_cache", 403),
        (Kind.FRONTEND, "h2", "POST", "/v1/models/../../reset_prefix_cache", 403),
        (Kind.FRONTEND, "h2", "DELETE", "/v1/models", 403),
        (Kind.FRONTEND, "h2", "GET", "/docs", 403),
        (Kind.OPERATOR, "ada", "POST", "/reset_prefix_cache", 200),
        (Kind.OPERATOR, "ada", "GET", "/metrics", 200),
        (Kind.OPERATOR, "ada", "POST", GENERATE, 403),
        (Kind.OPERATOR, "ada", "POST", CHAT, 403),
        (Kind.WORKER, "h1", "GET", "/health", 200),
    ],
)
async def test_what_each_kind_of_certificate_may_ask(
    kind: Kind,
    name: str,
    method: str,
    path: str,
    status: int,
    host: None,
    authorities: Authorities,
    engine: Engine,
) -> None:
    async with relaying(engine.url) as address:
        before = refused(SERVICE)
        url = URL(address + path, encoded=True)
        async with (
            session_of(authorities, address, authorities.files(name, kind)) as session,
            session.request(method, url, json={}) as answer,
        ):
            assert answer.status == status
        assert refused(SERVICE) == before + (status == 403)
        assert bool(engine.seen) == (status == 200 and path != REFUSED_PATH)


@pytest.mark.security
async def test_workers_of_other_hosts_may_not_even_connect(
    host: None, authorities: Authorities, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async with relaying(engine.url) as address:
        before = refused(SERVICE)
        files = authorities.files("h2", Kind.WORKER)
        async with session_of(authorities, address, files) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get("/health")
        await until(lambda: refused(SERVICE) > before)
    assert "commutator://test/worker/h2 must not send requests to workers" in caplog.text
    assert not engine.seen


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith(f"{SERVICE}: refused")]


async def knock(port: int, context: ssl.SSLContext | None) -> bytes:
    """Ask for something; what is answered."""
    with suppress(OSError):
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="" if context else None
            )
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: h1\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer
    return b""


@pytest.mark.security
@pytest.mark.parametrize("stranger", KINDS)
async def test_a_stranger_is_refused_logged_once_and_counted(
    stranger: str,
    host: None,
    authorities: Authorities,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with relaying(engine.url) as address:
        before = refused(SERVICE)
        port = int(address.rpartition(":")[2])
        assert await knock(port, stranger_contexts(authorities)[stranger]) == b""
        await until(lambda: refused(SERVICE) == before + 1)
    assert len(lines(caplog)) == 1
    assert not engine.seen


@pytest.mark.security
@pytest.mark.parametrize("secret", [None, RunSecret.from_text("theirs")])
async def test_a_certificate_without_the_secret_of_the_run_is_not_enough(
    secret: RunSecret | None,
    host: None,
    authorities: Authorities,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with relaying(engine.url) as address:
        before = refused(SERVICE)
        with adopt(secret):
            key = api_key_at(address) or "none"
        files = authorities.files("h2")
        async with (
            session_of(authorities, address, files, key) as session,
            session.get("/metrics") as answer,
        ):
            assert answer.status == 401
        assert refused(SERVICE) == before + 1
    assert len(lines(caplog)) == 1
    assert not engine.seen


@pytest.mark.security
async def test_requests_for_another_instance_are_refused(host: None, engine: Engine) -> None:
    async with (
        relaying(engine.url) as address,
        client_at(address, evolve(RECORD, instance="before")) as client,
    ):
        before = refused(SERVICE)
        with pytest.raises(EngineUnavailableError, match="it means instance 'before'"):
            await client.start()
        assert refused(SERVICE) == before + 1
    assert not engine.seen


@pytest.mark.security
@pytest.mark.parametrize(
    ("kind", "name"), [(Kind.FRONTEND, "h1"), (Kind.OPERATOR, "h1"), (Kind.HOST, "h2")]
)
async def test_nothing_is_sent_to_a_relay_of_another_kind_or_name(
    kind: Kind,
    name: str,
    host: None,
    authorities: Authorities,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_a_network(monkeypatch, authorities.network(name, kind)):
        async with relaying(engine.url) as address, client_at(address) as client:
            with pytest.raises(EngineUnavailableError, match=name):
                await client.start()
    assert not engine.seen


@pytest.mark.security
async def test_headers_and_connections_have_bounds(
    host: None,
    authorities: Authorities,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commutator_engine_kit.relay._MAX_CONNECTIONS", 1)
    files = authorities.files("h2")
    async with (
        relaying(engine.url) as address,
        session_of(authorities, address, files) as session,
    ):
        for headers in ({"X": "y" * 10_000}, {f"X-{number}": "y" for number in range(100)}):
            async with session.get("/metrics", headers=headers) as answer:
                assert answer.status == 400
        assert not engine.seen
        await asyncio.sleep(0)
        async with session.post(CHAT, json={}) as answer:
            assert await answer.content.readany() == b"first"
            assert await knock(int(address.rpartition(":")[2]), authorities.context(files)) == b""
            engine.go_on.set()
            assert await answer.read() == b"second"
    assert "1 connections are open" in caplog.text


async def test_without_tls_the_secret_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network("test", "h1", "10.0.0.1", "10.0.0.1")
    monkeypatch.setattr("commutator_engine_kit.http.is_loopback", lambda _: False)
    with adopt(OURS), on_a_network(monkeypatch, network):
        async with relaying(engine.url, tls=False) as address:
            assert address.startswith("http://")
            async with client_at(address) as client:
                assert (await client.start()).model == "m"
            async with client_at(address, key="guess") as client:
                with pytest.raises(EngineError, match="it does not know this run's secret"):
                    await client.start()


def test_relayed_addresses_keep_what_follows_the_port() -> None:
    both = "http://127.0.0.1:80?token_api=10.0.0.1:81"
    assert relayed_address(both, "10.0.0.1", 90, tls=True) == (
        "https://10.0.0.1:90?token_api=10.0.0.1:81"
    )
    assert relayed_address("http://127.0.0.1:80", "::1", 90, tls=False) == "http://[::1]:90"
