"""What the event bus `nats` promises beside the shipped suite: who is believed, and by what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import nkeys
import pytest
import trustme
from attrs import evolve
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.support.nats import NatsServer, fresh_subjects

from commutator.contract.event_bus import EventBus
from commutator.contract.settings import Secret
from commutator.contract.worker import EventSource
from commutator.kv_events.codec import seal_message
from commutator.trust import RunSecret, adopt, refused_connections
from commutator_nats.bus import NatsEventBus
from commutator_nats.config import NatsConfig, NatsTls
from commutator_nats.framing import Frame, Request
from commutator_testing.event_buses import EventReader, WorkerEvents

pytestmark = pytest.mark.slow

SECRET, OTHER_SECRET = RunSecret.new(), RunSecret.new()


@asynccontextmanager
async def client_of(server: NatsServer) -> AsyncIterator[Client]:
    """A client of the server itself, which is no part of a run."""
    client = Client()
    await client.connect(server.url)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def opened(config: NatsConfig) -> AsyncIterator[EventBus]:
    bus = NatsEventBus(config)
    try:
        yield bus
    finally:
        await bus.close()


def at(server: NatsServer, **options: Any) -> NatsConfig:
    config = NatsConfig(kind="nats", servers=(server.url,), cluster=fresh_subjects())
    return evolve(config, **options)


async def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


async def works(config: NatsConfig) -> None:
    """A message gets from a worker's host to a front door."""
    async with (
        opened(config) as host,
        opened(config) as door,
        WorkerEvents(host) as worker,
        EventReader(door, worker.source) as reader,
    ):
        worker.publish(3)
        await reader.has(3)


def subject_of(source: EventSource) -> str:
    return source.endpoint.removeprefix("nats-subject:").partition("#")[0]


def replays_of(source: EventSource) -> str:
    return str(source.replay_endpoint).removeprefix("nats-subject:")


@pytest.mark.security
async def test_who_does_not_know_the_secret_is_not_believed(nats: NatsServer) -> None:
    """It may publish at a worker's subject, as anyone on a server without permissions."""
    config = at(nats)
    with adopt(SECRET):
        async with (
            opened(config) as host,
            opened(config) as door,
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as reader,
            client_of(nats) as stranger,
        ):
            worker.publish(5)
            await reader.has(5)
            before = refused_connections().get("event bus", 0)
            subject = subject_of(worker.source)
            forged = msgspec.msgpack.encode(Frame("i", 5, 0, 1, b"poison"))
            await stranger.publish(subject, forged)
            await stranger.publish(subject, bytes(32) + forged)
            with adopt(OTHER_SECRET):
                await stranger.publish(subject, seal_message(subject, forged))
            with adopt(SECRET):  # what another worker's host sealed, at this worker's subject
                await stranger.publish(subject, seal_message(f"{subject}x", forged))
            await stranger.flush()
            await until(lambda: reader.malformed == 4)
            worker.publish(5)
            await reader.has(10)
            assert reader.resets == []
            assert refused_connections()["event bus"] == before + 4


@pytest.mark.security
async def test_what_was_sent_before_changes_nothing_when_it_is_sent_again(nats: NatsServer) -> None:
    config = at(nats)
    with adopt(SECRET):
        async with opened(config) as host, opened(config) as door, client_of(nats) as recorder:
            recorded: list[bytes] = []

            async def record(msg: Msg) -> None:
                recorded.append(msg.data)

            await recorder.subscribe(f"commutator.{config.cluster}.kv.>", cb=record)
            await recorder.flush()
            async with (
                WorkerEvents(host, instance="i") as before,
                EventReader(door, before.source) as connected,
            ):
                subject = subject_of(before.source)
                before.publish()
                await connected.has(1)  # what comes before the host is connected is only replayed
                before.publish(20)
                await until(lambda: len(recorded) >= 20)
            async with (
                WorkerEvents(host, instance="j") as after,
                EventReader(door, after.source) as reader,
            ):
                after.publish(10)
                await reader.has(10)
                for message in recorded.copy():
                    await recorder.publish(subject, message)
                await recorder.flush()
                after.publish(10)
                await reader.has(20)
                assert (reader.resets, reader.malformed) == ([], 0)


@pytest.mark.security
async def test_a_stranger_gets_no_replay(nats: NatsServer) -> None:
    """Neither by a request of its own, nor by one that it has seen, for its own inbox."""
    config = at(nats)
    with adopt(SECRET):
        async with (
            opened(config) as host,
            opened(config) as door,
            WorkerEvents(host) as worker,
            client_of(nats) as stranger,
        ):
            asked, answers = list[Msg](), list[bytes]()

            async def see(msg: Msg) -> None:
                asked.append(msg)

            async def take(msg: Msg) -> None:
                answers.append(msg.data)

            replays = replays_of(worker.source)
            await stranger.subscribe(replays, cb=see)
            inbox = stranger.new_inbox()
            await stranger.subscribe(inbox, cb=take)
            await stranger.flush()
            worker.publish(5)
            async with EventReader(door, worker.source) as reader:
                await reader.has(5)
            before = refused_connections().get("event bus", 0)
            request = msgspec.msgpack.encode(Request("i", 0, 0, bytes(16)))
            seen = [msg.data for msg in asked]
            assert seen
            mine = [request, bytes(32) + request, b"", *seen]
            for message in mine:
                await stranger.publish(replays, message, reply=inbox)
            await stranger.flush()
            await until(lambda: refused_connections()["event bus"] == before + len(mine))
            async with EventReader(door, worker.source) as reader:
                await reader.has(5)
            assert answers == []


async def test_two_clusters_on_one_server(nats: NatsServer) -> None:
    """The same worker id, of another run: nothing is read, and nothing refused."""
    async with (
        opened(at(nats)) as ours,
        opened(at(nats)) as theirs,
        WorkerEvents(ours) as here,
        WorkerEvents(theirs) as there,
        EventReader(ours, here.source) as reader,
    ):
        there.publish(50)
        here.publish(5)
        await reader.has(5)
        assert reader.malformed == 0


async def test_messages_above_what_the_server_carries_are_split(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "server", "max_payload: 2KB") as server:
        config = at(server)
        async with (
            opened(config) as host,
            opened(config) as door,
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as reader,
        ):
            for tokens in (4, 20_000, 100, 3_000, 500):
                worker.publish(tokens=tokens)
            await reader.has(5)
            assert reader.malformed == 0
            async with EventReader(door, worker.source) as late:
                await late.has(5)


async def test_a_front_door_that_the_server_cuts_off_subscribes_again(tmp_path: Path) -> None:
    """A slow consumer: it does not read, so the server closes its connection."""
    with NatsServer(tmp_path / "server", "max_pending: 100KB\nmax_payload: 64KB") as server:
        config = at(server)
        async with (
            opened(config) as host,
            opened(config) as door,
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as reader,
        ):
            worker.publish(10)
            await reader.has(10)
            assert isinstance(door, NatsEventBus)
            client = door._connection._client
            assert client is not None
            writer = cast(Any, client._transport)._io_writer
            writer.transport.pause_reading()
            log = tmp_path / "server" / "nats.log"
            while "Slow Consumer" not in log.read_text():
                worker.publish(20, tokens=10_000)
                await asyncio.sleep(0.05)
            writer.transport.resume_reading()
            await reader.has(worker.published)
            assert reader.resets == []
            assert reader.counters.interruptions


@pytest.mark.long
async def test_a_server_that_hangs_is_left_for_the_next(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "one") as one, NatsServer(tmp_path / "two") as two:
        config = at(one, servers=(one.url, two.url))
        async with (
            opened(config) as host,
            opened(config) as door,
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as reader,
        ):
            worker.publish(10)
            await reader.has(10)
            one.pause()
            try:
                worker.publish(10)
                await reader.has(20)
            finally:
                one.resume()
            assert reader.resets == []


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    for name in ("ours", "theirs"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / f"{name}-ca.pem")
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    return tmp_path


def tls_server(folder: Path, more: str = "") -> NatsServer:
    files = f'cert_file: "{folder}/ours.pem", key_file: "{folder}/ours.key"'
    verify = f', ca_file: "{folder}/ours-ca.pem", verify: true'
    return NatsServer(folder / "server", f"tls: {{{files}{verify}}}\n{more}")


def tls_config(server: NatsServer, folder: Path, who: str = "ours") -> NatsConfig:
    return at(
        server,
        servers=(server.url.replace("nats://", "tls://"),),
        tls=NatsTls(
            ca_file=str(folder / "ours-ca.pem"),
            cert_file=str(folder / f"{who}.pem"),
            key_file=str(folder / f"{who}.key"),
        ),
    )


@pytest.mark.security
async def test_tls_with_certificates_on_both_sides(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tls_server(certificates) as server:
        await works(tls_config(server, certificates))
        assert "can read which tokens" not in caplog.text
        theirs = tls_config(server, certificates, "theirs")
        async with opened(theirs) as bus, WorkerEvents(bus):
            await until(lambda: "cannot be used" in caplog.text)
            await asyncio.sleep(0.5)
            assert "go over NATS" not in caplog.text.rpartition("cannot be used")[2]


@pytest.mark.security
async def test_a_server_without_tls_gets_neither_the_token_nor_events(
    nats: NatsServer, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Someone between could pretend that the server knows no TLS."""
    heard = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (certificates / "token").write_text("s3cret")
    config = NatsConfig(
        kind="nats",
        servers=(f"tls://127.0.0.1:{port}",),
        tls=NatsTls(ca_file=str(certificates / "ours-ca.pem")),
        token=Secret(file=str(certificates / "token")),
    )
    async with opened(config) as bus, WorkerEvents(bus) as worker:
        worker.publish(10)
        await until(lambda: "does not require TLS" in caplog.text)
    server.close()
    assert heard == b""


async def test_a_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("s3cret")
    with NatsServer(tmp_path / "server", "authorization: {token: s3cret}") as server:
        await works(at(server, token=Secret(file=str(tmp_path / "token"))))
        async with opened(at(server)) as bus, WorkerEvents(bus):
            await until(lambda: "Authorization Violation" in caplog.text)


async def test_nkeys_with_permissions_for_the_cluster_alone(tmp_path: Path) -> None:
    """The permissions that the how-to gives are enough."""
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    (tmp_path / "seed").write_text(seed.decode())
    user = (
        f'{{nkey: {public}, permissions: {{publish: "commutator.mine.>", '
        'subscribe: "commutator.mine.>"}}'
    )
    with NatsServer(tmp_path / "server", f"authorization: {{users: [{user}]}}") as server:
        config = at(server, nkey_seed=Secret(file=str(tmp_path / "seed")), cluster="mine")
        await works(config)
