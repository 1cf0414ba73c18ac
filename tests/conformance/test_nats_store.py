"""The response store `nats` passes the shipped suite, and what it promises beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import nats as nats_library
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import JetStreamContext
from tests.support.nats import NatsServer, fresh_subjects

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator_responses_nats import session as sessions
from commutator_responses_nats.config import NatsStoreConfig
from commutator_responses_nats.records import Record, body_of, record_of, split, stored_of
from commutator_responses_nats.store import NatsStore
from commutator_testing.response_stores import (
    MAX_BYTES,
    TTL_S,
    Clock,
    ResponseStoreContract,
    stored,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jetstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that keeps what it is given in files."""
    folder = tmp_path_factory.mktemp("jetstream")
    with NatsServer(folder / "server", f'jetstream {{ store_dir: "{folder}/js" }}') as server:
        yield server


class Link:
    """Between a store and its server: passes bytes on, after a delay in each direction."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self._connections: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.port = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as listening:
            self.port = listening.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                self.port = 0
                tasks, self._connections = self._connections, set()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        ends = [writer]
        try:
            with suppress(OSError, asyncio.CancelledError):
                there, back = await asyncio.open_connection("127.0.0.1", self._server.port)
                ends.append(back)
                await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        finally:
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()


def config(
    port: int, cluster: str, max_bytes: int = MAX_BYTES, ttl_s: float = TTL_S, timeout_s: float = 5
) -> NatsStoreConfig:
    return NatsStoreConfig(
        kind="nats",
        servers=(f"nats://127.0.0.1:{port}",),
        cluster=cluster,
        max_bytes=max_bytes,
        ttl_s=ttl_s,
        timeout_s=timeout_s,
    )


class TestNats(ResponseStoreContract):
    is_shared = outlives = True

    @pytest.fixture(autouse=True)
    def _server(self, jetstream: NatsServer) -> None:
        self.server = jetstream
        self.clusters: dict[str, str] = {}
        self.link = Link(jetstream)

    @asynccontextmanager
    async def open_store(self, clock: Clock, name: str) -> AsyncIterator[ResponseStore]:
        cluster = self.clusters.setdefault(name, fresh_subjects())
        async with self.link.opened() if not self.link.port else _nothing():
            store = NatsStore(config(self.link.port, cluster, timeout_s=2), clock)
            try:
                yield store
            finally:
                await store.close()

    def outages(self) -> Mapping[str, AbstractAsyncContextManager[None]]:
        return {
            "stopped": self._stopped(),
            "hanging": self._hanging(),
            "slow": self._slow(),
            "stopped again": self._stopped(),
        }

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            await asyncio.to_thread(self.server.start)

    @asynccontextmanager
    async def _hanging(self) -> AsyncIterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()

    @asynccontextmanager
    async def _slow(self) -> AsyncIterator[None]:
        self.link.delay_s = 3.0
        try:
            yield
        finally:
            self.link.delay_s = 0.0


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def opened(options: NatsStoreConfig, clock: Clock) -> AsyncIterator[NatsStore]:
    store = NatsStore(options, clock)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def as_its_operator(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats_library.connect(server.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


def large(name: str, size: int, fill: bytes = b"x") -> StoredResponse:
    one = stored(name)
    return StoredResponse(
        id=one.id,
        owner=one.owner,
        previous=None,
        session="s",
        input=b'["' + fill * 10 + b'"]',
        response=fill * size,
    )


async def test_what_is_larger_than_a_message_is_kept_in_pieces_and_leaves_none(
    jetstream: NatsServer,
) -> None:
    """The servers take 1 MiB at once."""
    options = config(jetstream.port, fresh_subjects(), max_bytes=8 << 20)
    stream = f"commutator_responses_{options.cluster}"
    async with as_its_operator(jetstream) as js, opened(options, Clock()) as store:
        for fill in (b"a", b"b"):
            await store.put(large("1", 3 << 20, fill))
            assert await store.history("a", "1") == [large("1", 3 << 20, fill)]
        info = await js.stream_info(stream)
        assert info.state.messages == 1 + 7
        await store.put(large("2", 6 << 20))
        assert await store.history("a", "1") == []
        assert await store.history("a", "2") == [large("2", 6 << 20)]
        assert await store.delete("a", "2")
        info = await js.stream_info(stream)
        assert info.state.messages == 2  # the words that both are gone


async def test_what_is_gone_and_what_nobody_has_is_swept(jetstream: NatsServer) -> None:
    clock, options = Clock(), config(jetstream.port, fresh_subjects(), max_bytes=8 << 20)
    stream = f"commutator_responses_{options.cluster}"
    async with as_its_operator(jetstream) as js, opened(options, clock) as store:
        await store.put(large("1", 1 << 20))
        await store.put(stored("2"))
        await store.delete("a", "2")
        await js.publish(f"commutator.{options.cluster}.responses.parts.1000-ab.0", b"lost")
        async with opened(options, clock) as other:
            await other.put(stored("3"))
            clock.now_s += sessions._ORPHANED_S
            await other.put(large("1", 1 << 20))
            session = other._session
            assert session is not None
            await session.sweep()
        info = await js.stream_info(stream, f"commutator.{options.cluster}.responses.>")
        assert info.state.subjects is not None
        kinds = sorted(subject.split(".")[3] for subject in info.state.subjects)
        assert kinds == ["of", "of", "parts", "parts", "parts"]  # 3 has just expired
        assert await store.history("a", "1") == [large("1", 1 << 20)]


async def test_the_stream_takes_the_bound_that_is_configured_now(jetstream: NatsServer) -> None:
    cluster, clock = fresh_subjects(), Clock()
    async with opened(config(jetstream.port, cluster, max_bytes=1000), clock) as store:
        await store.put(stored("1", size=900))
    async with opened(config(jetstream.port, cluster, max_bytes=500), clock) as store:
        await store.put(stored("2", size=100))
        assert await store.history("a", "1") == []
        assert await store.history("a", "2") == [stored("2", size=100)]


async def test_a_server_without_streams_is_said_to_be_unavailable(nats: NatsServer) -> None:
    async with opened(config(nats.port, fresh_subjects()), Clock()) as store:
        with pytest.raises(Failure) as caught:
            await store.put(stored("1"))
    assert caught.value.status == 503


@given(
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.text(max_size=20),
    st.one_of(st.none(), st.text(max_size=9)),
    st.integers(1, 50),
)
def test_a_record_and_its_pieces_are_read_as_they_were_written(
    asked: bytes, said: bytes, text: str, maker: str | None, most: int
) -> None:
    one = StoredResponse(
        id=text,
        owner=text * 2,
        previous=maker,
        session=maker,
        input=asked,
        response=said,
        maker=maker,
        until_unix_s=1.5,
    )
    pieces = split(body_of(one), most)
    assert all(0 < len(piece) <= most for piece in pieces)
    headers = record_of(one, 2.5, "x", len(pieces)).headers
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    record = Record.read(headers)
    assert record is not None
    assert stored_of(record, b"".join(pieces)) == one
