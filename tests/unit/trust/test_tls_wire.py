"""Mutual TLS between hosts: who is let in, who is refused and counted, and renewed certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.certificates import Authorities, on_a_network

from commutator.frames import FrameProtocol
from commutator.trust import (
    ClientGate,
    Identity,
    Right,
    RunSecret,
    ServerGate,
    TlsError,
    connect,
    listen,
    refused_connections,
    wire,
)
from commutator.trust.identity import Kind
from commutator.trust.network import Certificates, Network

OURS = RunSecret.from_text("ours")
SERVICE = "test of TLS"


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


class Echo:
    """Answers every frame with itself; keeps who asked."""

    def __init__(self) -> None:
        self.peers: list[Identity | None] = []
        self.gate = ServerGate(SERVICE, OURS)
        self.port = 0

    def connection(self) -> FrameProtocol:
        def echo(frame: list[Any]) -> None:
            self.peers.append(protocol.identity)
            protocol.send(frame)

        protocol = FrameProtocol(echo, lambda _: None, self.gate)
        return protocol


class Client:
    def __init__(self, gate: ClientGate | None = None) -> None:
        self.got: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        gate = gate or ClientGate(SERVICE, OURS)
        self.frames = FrameProtocol(self.got.put_nowait, self.lost.set_result, gate)

    async def ask(self, frame: list[Any]) -> list[Any]:
        self.frames.send(frame)
        async with asyncio.timeout(10):
            return await self.got.get()


@asynccontextmanager
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    listener = await listen(server.connection, SERVICE, "127.0.0.1", 0)
    server.port = listener.port
    try:
        yield server
    finally:
        listener.close()


def refused() -> int:
    return refused_connections().get(SERVICE, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_hosts_of_a_cluster_know_each_other(
    authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_network(monkeypatch, authorities.network("h1")):
        async with echo() as server:
            client = Client(ClientGate(SERVICE, OURS, expects=Right.SERVE_WORKER, host="h1"))
            await connect(lambda: client.frames, "127.0.0.1", server.port)
            assert await client.ask(["hello", "x" * 100_000]) == ["hello", "x" * 100_000]
            assert server.peers == [Identity("test", Kind.HOST, "h1")]
            assert client.frames.identity == Identity("test", Kind.HOST, "h1")
            client.frames.close()


def stranger_contexts(authorities: Authorities) -> dict[str, ssl.SSLContext | None]:
    foreign = authorities.files("h1", by=authorities.theirs)
    elsewhere = authorities.files("h9", cluster="other")
    late = authorities.files("h8", valid=timedelta(hours=-0.5))
    old = authorities.context(authorities.files("h7"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    return {
        "plain": None,
        "no certificate": authorities.context(None),
        "another authority": authorities.context(foreign),
        "another cluster": authorities.context(elsewhere),
        "a certificate of nobody": authorities.context(authorities.files_of_nobody()),
        "an expired certificate": authorities.context(late),
        "an old TLS": old,
    }


KINDS = (
    "plain",
    "no certificate",
    "another authority",
    "another cluster",
    "a certificate of nobody",
    "an expired certificate",
    "an old TLS",
)


@pytest.mark.security
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stranger_is_refused_logged_and_counted(
    kind: str,
    authorities: Authorities,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = stranger_contexts(authorities)[kind]
    monkeypatch.setattr("commutator.trust.refusals._refusals._quiet_until_s", {})
    with on_a_network(monkeypatch, authorities.network("h1")):
        async with echo() as server:
            before, client = refused(), Client()
            loop = asyncio.get_running_loop()
            try:
                if context is None:
                    await loop.create_connection(lambda: client.frames, "127.0.0.1", server.port)
                else:
                    await loop.create_connection(
                        lambda: client.frames, "127.0.0.1", server.port, ssl=context,
                        server_hostname="",
                    )  # fmt: skip
                client.frames.send(["hello"])
                async with asyncio.timeout(10):
                    await client.lost
            except (OSError, TlsError):
                pass
            await until(lambda: refused() == before + 1)
            assert not server.peers
            assert client.got.empty()
    lines = [line for line in caplog.messages if line.startswith(f"{SERVICE}: refused")]
    assert len(lines) == 1, lines


@pytest.mark.security
async def test_silent_connections_have_a_deadline_and_too_many_are_refused_at_once(
    authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_MAX_PENDING", 3)
    monkeypatch.setattr(wire, "_HANDSHAKE_S", 2.0)
    with on_a_network(monkeypatch, authorities.network("h1")):
        async with echo() as server, asyncio.timeout(10):
            before = refused()
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            assert await silent[-1][0].read() == b""
            assert refused() == before + 1
            assert not silent[0][0].at_eof()
            await until(lambda: refused() == before + 4)
            client = Client()
            await connect(lambda: client.frames, "127.0.0.1", server.port)
            assert await client.ask(["hello"]) == ["hello"]
            client.frames.close()
            for _, writer in silent:
                writer.close()


async def test_a_connection_that_cannot_be_accepted_does_not_end_the_listener(
    authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, failures = asyncio.get_running_loop(), [OSError(24, "Too many open files")]
    accept = loop.sock_accept

    async def failing_once(listening: Any) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing_once)
    with on_a_network(monkeypatch, authorities.network("h1")):
        async with echo() as server:
            client = Client()
            await connect(lambda: client.frames, "127.0.0.1", server.port)
            assert await client.ask(["hello"]) == ["hello"]
            client.frames.close()
    assert not failures


@pytest.mark.security
@pytest.mark.parametrize(
    ("expects", "kind", "name"),
    [
        (Right.SERVE_WORKER, Kind.FRONTEND, "h1"),
        (Right.SERVE_WORKER, Kind.OPERATOR, "h1"),
        (Right.SERVE_WORKER, Kind.HOST, "h2"),
        (Right.SERVE_REGISTRY, Kind.WORKER, "h1"),
        (Right.SERVE_REGISTRY, Kind.FRONTEND, "h1"),
    ],
)
async def test_a_server_of_another_kind_or_name_gets_nothing(
    expects: Right, kind: Kind, name: str, authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_network(monkeypatch, authorities.network(name, kind)):
        async with echo() as server:
            client = Client(ClientGate(SERVICE, OURS, expects=expects, host="h1"))
            client.frames.send(["a prompt"])
            await connect(lambda: client.frames, "127.0.0.1", server.port)
            async with asyncio.timeout(10):
                reason = await client.lost
            assert name in reason
            assert not server.peers


@pytest.mark.security
async def test_renewed_certificates_are_used_and_connections_stay(
    authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = authorities.network("h1")
    assert network.tls is not None
    with on_a_network(monkeypatch, network):
        clock = [0.0]
        certificates = Certificates(network.tls, clock=lambda: clock[0])
        monkeypatch.setattr(wire, "_certificates", lambda _: certificates)
        async with echo() as server:
            first = Client()
            await connect(lambda: first.frames, "127.0.0.1", server.port)
            assert await first.ask(["before"]) == ["before"]
            authorities.ours.renew("h1", authorities.now, timedelta(days=5))
            clock[0] = 10.0
            second = Client()
            transport = await connect(lambda: second.frames, "127.0.0.1", server.port)
            assert await second.ask(["new"]) == ["new"]
            seen = transport.get_extra_info("ssl_object").getpeercert()
            ends = authorities.now + timedelta(days=5)
            assert abs(ssl.cert_time_to_seconds(seen["notAfter"]) - ends.timestamp()) < 2
            assert await first.ask(["after"]) == ["after"]
            for client in (first, second):
                client.frames.close()


def test_files_that_cannot_be_used_change_nothing(
    authorities: Authorities, caplog: pytest.LogCaptureFixture
) -> None:
    files = authorities.files("h1")
    clock = [0.0]
    certificates = Certificates(files, clock=lambda: clock[0])
    former = certificates.server
    authorities.files("h2")
    Path(files.key_file).write_bytes((authorities.ours.folder / "h2.key").read_bytes())
    clock[0] = 10.0
    assert certificates.server is former
    assert "the former certificate stays in use" in caplog.text
    authorities.ours.renew("h1", authorities.now, timedelta(days=90))
    clock[0] = 20.0
    assert certificates.server is not former


@pytest.mark.security
def test_an_authority_that_is_no_longer_in_the_file_is_no_longer_trusted(
    authorities: Authorities,
) -> None:
    files = authorities.files("h1")
    ca = Path(files.ca_file)
    ours, theirs = ca.read_bytes(), (authorities.theirs.folder / "ca.pem").read_bytes()
    ca.write_bytes(ours + theirs)
    clock = [0.0]
    certificates = Certificates(files, clock=lambda: clock[0])
    assert len(certificates.server.get_ca_certs()) == 2
    ca.write_bytes(ours)
    clock[0] = 10.0
    assert len(certificates.server.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("days", "said"), [(90, ""), (10, "expires in 10.0 days"), (13, "expires in 13.0 days")]
)
def test_a_certificate_that_expires_soon_is_logged(
    days: int, said: str, authorities: Authorities, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    Certificates(authorities.files("h1", valid=timedelta(days=days, minutes=1)))
    assert said in caplog.text
    assert bool(said) is bool(caplog.text)


def test_why_certificates_cannot_be_used(authorities: Authorities, tmp_path: Path) -> None:
    good = authorities.files("h1")
    with pytest.raises(TlsError, match=r"other hosts would refuse it.*issuer"):
        Certificates(authorities.files("h1", by=authorities.theirs))
    with pytest.raises(TlsError, match=r"other hosts would refuse it.*expired"):
        Certificates(authorities.files("h3", valid=timedelta(minutes=-1)))
    nowhere = str(tmp_path / "nowhere")
    for wrong in (
        {"ca_file": nowhere},
        {"cert_file": nowhere},
        {"key_file": nowhere},
    ):
        with pytest.raises(TlsError, match="nowhere: No such file"):
            Certificates(evolve(good, **wrong))


def test_a_network_survives_its_text(authorities: Authorities) -> None:
    for network in (authorities.network("h1"), Network("c", "h")):
        assert Network.from_json(network.to_json()) == network
