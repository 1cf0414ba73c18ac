"""Connections between processes of one run, of another, and of none: over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from commutator.frames import FrameProtocol, pack
from commutator.trust import ClientGate, Gate, RunSecret, ServerGate, adopt, refused_connections
from commutator.trust.gate import address_text
from commutator.trust.handshake import MAGIC

OURS, THEIRS = RunSecret.from_text("ours"), RunSecret.from_text("theirs")


class Server:
    """Answers every frame with itself; keeps what it got."""

    def __init__(self, gate: Gate) -> None:
        self.frames: list[list[Any]] = []
        self.gate = gate
        self.port = 0

    def connection(self) -> FrameProtocol:
        def echo(frame: list[Any]) -> None:
            self.frames.append(frame)
            protocol.send(frame)

        protocol = FrameProtocol(echo, lambda _: None, self.gate)
        return protocol


@asynccontextmanager
async def serving(gate: Gate, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    server = Server(gate)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(server.connection, host, 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


class Client:
    def __init__(self, gate: Gate | None) -> None:
        self.got: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.frames = FrameProtocol(self.got.put_nowait, self.lost.set_result, gate)

    async def connect(self, port: int, host: str = "127.0.0.1") -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.frames, host, port)


def refused() -> int:
    return refused_connections().get("test", 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_process_of_the_run_is_served_and_what_it_sent_at_once_arrives_in_order() -> None:
    async with serving(ServerGate("test", OURS)) as server:
        client = Client(ClientGate("test", OURS))
        await client.connect(server.port)
        client.frames.send(["first", "x" * 100_000])
        client.frames.send(["second"])
        await client.frames.proven()
        assert [(await client.got.get())[0] for _ in range(2)] == ["first", "second"]
        client.frames.close()


async def test_an_ipv4_client_of_a_server_on_every_address_is_served() -> None:
    async with serving(ServerGate("test", OURS), "0.0.0.0") as server:
        client = Client(ClientGate("test", OURS))
        await client.connect(server.port)
        await client.frames.proven()
        client.frames.close()


def test_both_ends_write_an_address_in_the_same_way() -> None:
    assert address_text(("::ffff:10.0.0.5", 80, 0, 0)) == "10.0.0.5:80"
    assert address_text(("fe80::1%eth0", 80, 0, 3)) == "fe80::1:80"
    assert address_text("") == address_text(None) == ""


@pytest.mark.security
@pytest.mark.parametrize("gate", [None, ClientGate("test", THEIRS), ClientGate("other", OURS)])
async def test_a_stranger_is_refused_before_its_first_message_is_parsed(gate: Gate | None) -> None:
    async with serving(ServerGate("test", OURS)) as server:
        before = refused()
        client = Client(gate)
        await client.connect(server.port)
        client.frames.send(["register", 1, {}, 3600.0])
        async with asyncio.timeout(10):
            await client.lost
        await until(lambda: refused() > before)
        assert not server.frames
        assert client.got.empty()
        assert refused() == before + 1


@pytest.mark.security
@pytest.mark.parametrize("gate", [None, ServerGate("test", THEIRS)])
async def test_an_impostor_at_the_servers_port_gets_no_message(gate: Gate | None) -> None:
    received = bytearray()
    got = Server(gate or ServerGate("test"))
    with adopt(None):  # the impostor of no run answers everyone
        loop = asyncio.get_running_loop()

        class Listening(FrameProtocol):
            def data_received(self, data: bytes) -> None:
                received.extend(data)
                super().data_received(data)

        server = await loop.create_server(
            lambda: Listening(got.frames.append, lambda _: None, got.gate), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        client = Client(ClientGate("test", OURS))
        await client.connect(port)
        client.frames.send(["generate", 1, b"a private prompt"])
        with pytest.raises(ConnectionError):
            await client.frames.proven()
        async with asyncio.timeout(10):
            await client.lost
        server.close()
    assert b"private" not in received
    assert not got.frames
    assert len(received) == len(MAGIC) + 32, "the impostor saw random bytes only"


@pytest.mark.security
async def test_an_impostor_that_passes_everything_on_to_the_real_server_gets_nothing() -> None:
    async with serving(ServerGate("test", OURS)) as real:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", real.port)

            async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                with suppress(OSError):
                    while data := await source.read(4096):
                        target.write(data)
                target.close()

            await asyncio.gather(copy(reader, back), copy(there, writer))
            for end in (back, writer):
                with suppress(OSError):
                    await end.wait_closed()
            passed_on.set()

        passed_on = asyncio.Event()
        impostor = await asyncio.start_server(relay, "127.0.0.1", 0)
        client = Client(ClientGate("test", OURS))
        await client.connect(impostor.sockets[0].getsockname()[1])
        client.frames.send(["generate", 1, b"a private prompt"])
        with pytest.raises(ConnectionError, match="secret"):
            await client.frames.proven()
        async with asyncio.timeout(10):
            await passed_on.wait()
        impostor.close()
        assert not real.frames


@pytest.mark.security
async def test_a_peer_that_says_nothing_or_too_little_is_closed_at_the_deadline() -> None:
    gate = ServerGate("test", OURS)
    gate.deadline_s = 0.2
    async with serving(gate) as server:
        before = refused()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(MAGIC[:3])
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        await until(lambda: refused() > before)


@pytest.mark.security
async def test_many_silent_connections_keep_nobody_out_and_are_bounded() -> None:
    gate = ServerGate("test", OURS, max_pending=8)
    async with serving(gate) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        client = Client(ClientGate("test", OURS))
        await client.connect(server.port)
        await client.frames.proven()
        await until(lambda: len(gate._pending) <= 8)
        client.frames.close()
        for one in silent:
            one.close()


@pytest.mark.security
async def test_a_process_that_cannot_read_its_secret_serves_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMUTATOR_SECRET_FILE", "/nowhere/secret")
    async with serving(ServerGate("test")) as server:
        for gate in (None, ClientGate("test", OURS)):
            client = Client(gate)
            await client.connect(server.port)
            client.frames.send(["hello"])
            async with asyncio.timeout(10):
                await client.lost
        assert not server.frames
        own = Client(ClientGate("test"))
        await own.connect(server.port)
        with pytest.raises(ConnectionError, match="/nowhere/secret"):
            await own.frames.proven()


async def test_processes_of_no_run_talk_without_a_handshake() -> None:
    async with serving(ServerGate("test")) as server:
        client = Client(ClientGate("test"))
        await client.connect(server.port)
        await client.frames.proven()
        client.frames.send(["hello"])
        assert await client.got.get() == ["hello"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(pack(["plain"]))
        assert await reader.readexactly(len(pack(["plain"]))) == pack(["plain"])
        writer.close()
        client.frames.close()
