"""Whoever is not of the cluster is refused on each wire: one line in the log, counted once."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import Authorities, on_a_network
from tests.unit.trust.test_rights_by_kind import OURS, Peer, ScriptedEngine, refused, until
from tests.unit.trust.test_tls_wire import KINDS, stranger_contexts

from commutator.engine.protocol import PROTOCOLS
from commutator.engine.protocol import SERVICE as TOKEN_API
from commutator.frames import FrameProtocol, pack
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import SERVICE as REGISTRY
from commutator.registry.server import RegistryServer
from commutator.trust import RunSecret, adopt
from commutator.trust.identity import Kind
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import SERVICE as EXPORTER
from commutator_engine_kit.server import TokenApiServer
from commutator_limits.service import SERVICE as LIMITS
from commutator_limits.service import LedgerService

pytestmark = pytest.mark.security

FIRST_FRAMES: dict[str, list[Any]] = {
    "token API": ["hello", PROTOCOLS.oldest, None],
    "registry": ["watch"],
    "hub": [LIMITS, "open", "door", "1", []],
    "exporter": ["hello"],
}
SERVICES = {"token API": TOKEN_API, "registry": REGISTRY, "hub": REGISTRY, "exporter": EXPORTER}
WRONG_KINDS = (  # everyone may watch the registry; see test_rights_by_kind for the rest
    ("token API", Kind.WORKER),
    ("hub", Kind.WORKER),
    ("hub", Kind.OPERATOR),
    ("exporter", Kind.FRONTEND),
    ("exporter", Kind.OPERATOR),
)


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@pytest.fixture
def host(authorities: Authorities, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is host h1, of the run of OURS, and logs each refusal."""
    monkeypatch.setattr("commutator.trust.refusals._refusals._quiet_until_s", {})
    with adopt(OURS), on_a_network(monkeypatch, authorities.network("h1")):
        yield


@asynccontextmanager
async def listening(wire: str) -> AsyncIterator[int]:
    """The port of a server of that wire."""
    async with AsyncExitStack() as stack:
        if wire == "token API":
            engine = TokenApiServer(ScriptedEngine())
            stack.push_async_callback(engine.stop)
            yield await engine.start("127.0.0.1", 0)
        elif wire == "exporter":
            exporter = BlockExporter(lambda: None)
            stack.callback(exporter.stop)
            yield int(exporter.start("127.0.0.1").rpartition(":")[2])
        else:
            registry = MemoryRegistry()
            server = RegistryServer(registry, [LedgerService()])
            stack.push_async_callback(registry.close)
            stack.push_async_callback(server.stop)
            yield int((await server.start()).rpartition(":")[2])


async def attack(port: int, one: Peer, frame: list[Any], context: Any) -> None:
    """Connect and ask; returns when the connection has ended."""
    loop = asyncio.get_running_loop()
    options = {} if context is None else {"ssl": context, "server_hostname": ""}
    with suppress(OSError):
        await loop.create_connection(lambda: one.frames, "127.0.0.1", port, **options)
        one.frames.send(frame)
        async with asyncio.timeout(10):
            await one.lost


def lines(caplog: pytest.LogCaptureFixture, service: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(f"{service}: refused")]


@pytest.mark.parametrize("stranger", KINDS)
@pytest.mark.parametrize("wire", SERVICES)
async def test_a_stranger_is_refused_on_each_wire(
    wire: str,
    stranger: str,
    host: None,
    authorities: Authorities,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = SERVICES[wire]
    async with listening(wire) as port:
        before, one = refused(service), Peer(service)
        await attack(port, one, FIRST_FRAMES[wire], stranger_contexts(authorities)[stranger])
        await until(lambda: refused(service) == before + 1)
        assert one.got.empty()
    assert len(lines(caplog, service)) == 1


@pytest.mark.parametrize(("wire", "kind"), WRONG_KINDS)
async def test_the_wrong_kind_is_refused(
    wire: str, kind: Kind, host: None, authorities: Authorities, caplog: pytest.LogCaptureFixture
) -> None:
    service = SERVICES[wire]
    async with listening(wire) as port:
        before, one = refused(service), Peer(service)
        context = authorities.context(authorities.files("h2", kind))
        await attack(port, one, FIRST_FRAMES[wire], context)
        await until(lambda: refused(service) == before + 1)
        assert one.got.empty()
    (line,) = lines(caplog, service)
    assert f"commutator://test/{kind}/h2 must not" in line


@pytest.mark.parametrize("wire", SERVICES)
async def test_a_certificate_without_the_secret_of_the_run_is_not_enough(
    wire: str, host: None, authorities: Authorities, caplog: pytest.LogCaptureFixture
) -> None:
    service = SERVICES[wire]
    async with listening(wire) as port:
        before = refused(service)
        one = Peer(service, RunSecret.from_text("theirs"))
        context = authorities.context(authorities.files("h2"))
        await attack(port, one, FIRST_FRAMES[wire], context)
        await until(lambda: refused(service) == before + 1)
        assert one.got.empty()
    assert len(lines(caplog, service)) == 1


@pytest.mark.parametrize("wire", ["token API", "registry"])
async def test_hosts_of_the_cluster_are_let_in(
    wire: str, host: None, authorities: Authorities
) -> None:
    """So the tests above do not pass because nobody is."""
    async with listening(wire) as port:
        before, one = refused(SERVICES[wire]), Peer(SERVICES[wire])
        context = authorities.context(authorities.files("h2"))
        await asyncio.get_running_loop().create_connection(
            lambda: one.frames, "127.0.0.1", port, ssl=context, server_hostname=""
        )
        answer = await one.answer(*FIRST_FRAMES[wire])
        assert answer[0] == {"token API": "info", "registry": "snapshot"}[wire]
        assert refused(SERVICES[wire]) == before
        one.frames.close()


def knock(port: int, context: ssl.SSLContext | None) -> None:
    """Connect, ask for something, and wait for the end."""
    with suppress(OSError), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        if context is not None:
            connection = stack.enter_context(
                context.wrap_socket(connection, do_handshake_on_connect=False)
            )
            connection.do_handshake()
        connection.sendall(pack(["hello"]))
        connection.recv(100)


@pytest.mark.parametrize("wire", SERVICES)
async def test_a_refused_connection_leaves_no_memory(
    wire: str, host: None, authorities: Authorities
) -> None:
    """Its 256 KiB are freed by themselves: the garbage collector, which is slow, is not needed.

    Nor does a server keep what it made for the connection.
    """
    contexts: dict[str, ssl.SSLContext | None] = dict(stranger_contexts(authorities))
    contexts["no secret"] = authorities.context(authorities.files("h2"))

    def held(kind: type = SSLProtocol) -> int:
        return sum(type(one) is kind for one in gc.get_objects())

    async with listening(wire) as port:
        gc.collect()
        before, frames, seen = held(), held(FrameProtocol), refused(SERVICES[wire])
        gc.disable()
        try:
            for number, context in enumerate(contexts.values(), 1):
                await asyncio.to_thread(knock, port, context)
                await until(lambda: refused(SERVICES[wire]) == seen + number)  # noqa: B023 - at once
                await until(lambda: held() == before)
        finally:
            gc.enable()
        gc.collect()
        assert held(FrameProtocol) == frames
