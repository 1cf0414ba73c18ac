"""Connections to HTTP engines: what is sent, which are used again, and how they fail."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from tests.support.certificates import Authorities
from tests.support.fake_transport import FakeTransport

from commutator.errors import EngineError, EngineUnavailableError
from commutator_engine_kit.http import FailedAnswerError, HttpServer
from commutator_engine_kit.http_connections import MAX_HEAD_BYTES, HttpConnections

EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"


@define
class RawServer:
    """Answers each request with the same bytes, whatever it asks."""

    answer: bytes = EMPTY
    closes: bool = False
    """After each answer."""
    requests: list[bytes] = field(factory=list)
    connections: int = 0
    gone: asyncio.Event = field(factory=asyncio.Event)
    """Set when a client closed its connection."""
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await self._head(reader):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self.answer)
                if self.closes:
                    return
            self.gone.set()
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""


@asynccontextmanager
async def serving(
    server: RawServer, context: ssl.SSLContext | None = None
) -> AsyncIterator[RawServer]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    scheme = "http" if context is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server


@asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[HttpServer]:
    client = HttpServer("E", url, **options)
    yield client
    await client.close()


async def ask(client: HttpServer, headers: dict[str, str] | None = None) -> bytes:
    async with asyncio.timeout(30):
        async with await client.post("/generate", {"x": [1, 2]}, headers) as answer:
            return await answer.read()


async def test_what_is_sent() -> None:
    async with serving(RawServer()) as server, client_of(server.url, api_key="k") as client:
        await ask(client, {"X-Request-Id": "r-ü", "traceparent": "t"})
        port = server.url.rpartition(":")[2]
        assert server.requests[0].decode().split("\r\n") == [
            "POST /generate HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            "Authorization: Bearer k",
            "X-Request-Id: r-ü",
            "traceparent: t",
            "Content-Length: 11",
            "",
            '{"x":[1,2]}',
        ]


async def test_a_path_and_a_login_in_the_url() -> None:
    async with serving(RawServer()) as server:
        url = server.url.replace("//", "//ada:pass%40word@") + "/vllm/"
        async with client_of(url) as client:
            await ask(client)
        assert server.requests[0].startswith(b"POST /vllm/generate HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Basic YWRhOnBhc3NAd29yZA==\r\n" in server.requests[0]


@pytest.mark.security
@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nX: y", "a\rX: y", "a\0"])
async def test_a_value_that_would_be_two_headers_is_not_sent(value: str) -> None:
    async with serving(RawServer()) as server, client_of(server.url) as client:
        with pytest.raises(ValueError, match="X-Request-Id"):
            await ask(client, {"X-Request-Id": value})
        assert not server.requests


async def test_one_connection_for_one_request_after_the_other() -> None:
    async with serving(RawServer()) as server, client_of(server.url) as client:
        assert [await ask(client) for _ in range(3)] == [b""] * 3
        assert server.connections == 1
        await asyncio.gather(*(ask(client) for _ in range(3)))
        assert server.connections == 3
        assert len(server.requests) == 6


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        EMPTY + b"HTTP/1.1 408 Request Timeout\r\n\r\n",
    ],
)
async def test_a_connection_that_is_not_used_again(answer: bytes) -> None:
    async with serving(RawServer(answer)) as server, client_of(server.url) as client:
        assert [await ask(client) for _ in range(2)] == [b""] * 2
        assert server.connections == 2


async def test_an_idle_connection_that_the_server_closes() -> None:
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=60)
    await answered(connections, transports)
    transports[0].lose()
    await answered(connections, transports)
    transports[1].receive(b"H")
    await answered(connections, transports)
    assert [transport.closed for transport in transports] == [True, True, False]
    await connections.close()


async def test_a_connection_that_was_idle_too_long_is_closed() -> None:
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=0)
    await answered(connections, transports)
    assert not transports[0].closed
    await answered(connections, transports)
    assert len(transports) == 2
    async with asyncio.timeout(30):
        while not transports[1].closed:
            await asyncio.sleep(0)
    await connections.close()


async def test_a_question_is_asked_again_when_an_old_connection_closes() -> None:
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=60)
    await answered(connections, transports)
    asking = asyncio.create_task(connections.ask(b"question", again=True))
    await asyncio.sleep(0)
    transports[0].lose()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [transport.written[-1] for transport in transports] == [b"question"] * 2
    transports[1].lose()
    with pytest.raises(EngineUnavailableError, match="the server closed it"):
        await asking
    assert len(transports) == 2, "a new one that closes is an answer"


async def test_a_body_that_nobody_reads_stops() -> None:
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=60)
    asking = asyncio.create_task(connections.ask(b"request"))
    await asyncio.sleep(0)
    piece = b"x" * (64 << 10)
    transports[0].receive(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (6 * len(piece)))
    async with await asking as answer:
        for number in range(5):
            assert not transports[0].paused, number
            transports[0].receive(piece)
        paused: list[bool] = [transports[0].paused]
        assert await anext(answer) == piece * 5
        paused.append(transports[0].paused)
        assert paused == [True, False]
        transports[0].receive(piece)
        assert await answer.read() == piece
    await connections.close()


async def test_an_answer_that_comes_before_the_whole_request() -> None:
    """What is left of the request must not be in the way of the next."""
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=60)
    await answered(connections, transports, unsent_bytes=1)
    assert transports[0].closed
    await connections.close()


def into(transports: list[FakeTransport]) -> Callable[[Callable[[], asyncio.Protocol]], Any]:
    async def connect(factory: Callable[[], asyncio.Protocol]) -> None:
        transports.append(FakeTransport(factory))

    return connect


async def answered(
    connections: HttpConnections, transports: list[FakeTransport], unsent_bytes: int = 0
) -> None:
    """One request, which the newest connection answers."""
    asking = asyncio.create_task(connections.ask(b"request"))
    await asyncio.sleep(0)
    transports[-1].unsent_bytes = unsent_bytes
    transports[-1].receive(EMPTY)
    async with await asking as answer:
        assert await answer.read() == b""


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 6),
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD_BYTES // 25 + 1),
        BEGUN + b"0\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES,
        BEGUN + b"5;" + b"x" * 2 * MAX_HEAD_BYTES,
    ],
    ids=["header", "headers", "announcements", "trailer", "chunk extension"],
)
@pytest.mark.security
async def test_what_is_no_answer_has_a_limit(answer: bytes) -> None:
    transports: list[FakeTransport] = []
    connections = HttpConnections("X", into(transports), max_idle_s=60)

    async def read() -> None:
        async with await connections.ask(b"request") as begun:
            await begun.read()

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    for begin in range(0, len(answer), 1000):
        transports[0].receive(answer[begin : begin + 1000])
    async with asyncio.timeout(30):
        with pytest.raises(EngineUnavailableError, match=r"lost \(it sent more than 64 KiB"):
            await reading
    assert transports[0].closed
    await connections.close()


async def test_a_server_that_closes_is_not_asked_twice() -> None:
    async with serving(RawServer(b"", closes=True)) as server, client_of(server.url) as client:
        with pytest.raises(EngineUnavailableError, match=r"connection lost \(the server closed it"):
            await ask(client)
        assert len(server.requests) == 1


async def test_who_leaves_closes_the_connection() -> None:
    for waits_for_head in (True, False):
        told = b"" if waits_for_head else BEGUN
        async with serving(RawServer(told)) as server, client_of(server.url) as client:
            asking = asyncio.create_task(ask(client))
            async with asyncio.timeout(30):
                while not server.requests:
                    await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await server.gone.wait()


async def test_a_connection_that_is_made_in_vain_is_closed() -> None:
    transports: list[FakeTransport] = []

    async def refuse(factory: Callable[[], asyncio.Protocol]) -> None:
        transports.append(FakeTransport(factory))
        raise EngineUnavailableError("not the one that is meant")

    with pytest.raises(EngineUnavailableError, match="not the one"):
        await HttpConnections("X", refuse, max_idle_s=60).ask(b"request")
    assert transports[0].closed
    assert not transports[0].written


async def test_closing_ends_what_is_being_answered() -> None:
    async with serving(RawServer(BEGUN)) as server, client_of(server.url) as client:
        async with await client.post("/generate", {}) as answer:
            assert await anext(answer) == b"first"
            await client.close()
            with pytest.raises(EngineUnavailableError, match="closed here"):
                await anext(answer)
        server.answer = EMPTY
        assert await ask(client) == b"", "it connects anew"


async def test_an_error_and_a_redirect() -> None:
    refusal = b'HTTP/1.1 418 X\r\nContent-Length: 15\r\n\r\n{"detail":"no"}'
    async with serving(RawServer(refusal)) as server, client_of(server.url) as client:
        with pytest.raises(FailedAnswerError, match=r"^no$") as failed:
            await ask(client)
        assert failed.value.status == 418
        server.answer = b"HTTP/1.1 308 X\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n"
        with pytest.raises(FailedAnswerError) as failed:
            await ask(client)
        error = await client.error_for(failed.value.status, str(failed.value))
        assert type(error) is EngineError
        assert "answers 308 where 200 is expected; if it redirects" in str(error)
        with pytest.raises(EngineError, match="answers 308 where 200 is expected"):
            await client.ask("/health")
        assert server.connections == 1, "the body of an error was read"


async def test_a_connection_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("commutator_engine_kit.http.start_connection", hang)
    monkeypatch.setattr("commutator_engine_kit.http._CONNECT_S", 0.01)
    async with client_of("http://127.0.0.1:9") as client:
        for asking in (ask(client), client.ask("/health")):
            with pytest.raises(EngineUnavailableError, match=r"no answer$"):
                await asking


@pytest.mark.security
async def test_tls_to_a_server_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authorities = Authorities(tmp_path)
    files = authorities.files("engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    async with serving(RawServer(), context) as server, client_of(server.url) as client:
        for asking in (ask(client), client.ask("/health")):
            with pytest.raises(EngineUnavailableError, match="be reached: TLS failed: ") as no:
                await asking
            assert "certificate" in str(no.value)
        assert not server.requests
        monkeypatch.setattr(
            "commutator_engine_kit.http._system_trust", lambda: authorities.context(None)
        )
        assert await ask(client) == b""
