"""The relay: an engine's own events, numbered and kept at its host, passed on to a bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.certificates import Authorities, on_a_network
from tests.unit.routing.fake_engine import FakeEngine, info, record, stored

from commutator.contract.block import BlocksCleared
from commutator.contract.event_bus import EventBus, EventOutlet, EventStream, KeptMessages
from commutator.contract.worker import EventSource, WorkerRecord
from commutator.kv_events.codec import decode_batch
from commutator.kv_events.relay import EventRelay
from commutator.kv_events.subscriber import EventSubscriber, SourceTimes
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator.trust import Network, RunSecret, TlsFiles, adopt, use_network

TIMES = SourceTimes(replay_timeout_s=0.3, settle_s=0.05, check_interval_s=0.5)


class Outlet(EventOutlet):
    """Notes what is sent."""

    def __init__(self, stream: EventStream, kept: KeptMessages) -> None:
        self.stream, self.kept = stream, kept
        self.sent: list[tuple[int, bytes]] = []
        self.open = True
        self.source = EventSource(endpoint=f"noted:{stream.rank}", replay_endpoint="noted:again")

    def send(self, sequence: int, body: bytes) -> None:
        self.sent.append((sequence, body))

    async def close(self) -> None:
        self.open = False

    @property
    def numbers(self) -> list[int]:
        return [sequence for sequence, _ in self.sent]


class Bus(EventBus):
    def __init__(self) -> None:
        self.outlets: list[Outlet] = []

    async def publish(self, stream: EventStream, kept: KeptMessages) -> EventOutlet:
        self.outlets.append(Outlet(stream, kept))
        return self.outlets[-1]

    def subscribe(self, source: EventSource, on_malformed: Callable[[Exception], None]) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...


def worker(source: EventSource | None, ranks: int = 1) -> WorkerRecord:
    return evolve(record("w-0", info(source, ranks=ranks)), instance="i")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


async def test_what_the_engine_publishes_is_numbered_kept_and_sent() -> None:
    bus, relay = Bus(), None
    async with FakeEngine() as engine:
        relay = EventRelay(bus, TIMES)
        await engine.publish(stored(0, 1))
        announced = await relay.announced(worker(engine.source))
        (outlet,) = bus.outlets
        assert announced.info.kv_events == outlet.source
        assert outlet.stream == EventStream(model="m", worker_id="w-0", instance="i", rank=0)
        await until(lambda: outlet.numbers == [0])
        await engine.publish(stored(1, 2), lost=True)
        await engine.publish(stored(2, 3))
        await until(lambda: outlet.numbers == [0, 1, 2])
        assert [body for _, body in outlet.sent] == engine.log, "unchanged, and in order"
        assert list(outlet.kept.since(1)) == outlet.sent[1:]
        await relay.close()
        assert not outlet.open


async def test_what_is_lost_for_good_is_an_empty_message(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    async with FakeEngine(keep=1) as engine:
        relay = EventRelay(bus, TIMES)
        await relay.announced(worker(engine.source))
        (outlet,) = bus.outlets
        await engine.publish(stored(0, 1))
        await until(lambda: outlet.numbers == [0])
        await engine.publish(BlocksCleared(), lost=True)
        await engine.publish(stored(1, 2), lost=True)
        await engine.publish(stored(2, 3))
        await until(lambda: outlet.numbers == [0, 1, 2])
        assert [body for _, body in outlet.sent] == [engine.log[0], b"", engine.log[3]]
        assert "front doors drop its blocks" in caplog.text
        await relay.close()


async def test_an_engine_that_comes_back_at_other_addresses_keeps_its_stream() -> None:
    bus, relay = Bus(), EventRelay(Bus(), TIMES)
    async with FakeEngine() as first, FakeEngine() as second:
        relay = EventRelay(bus, TIMES)
        before = await relay.announced(worker(first.source))
        (outlet,) = bus.outlets
        await first.publish(stored(0, 1))
        await until(lambda: outlet.numbers == [0])
        await second.publish(stored(1, 2))
        after = await relay.announced(worker(second.source))
        assert after.info.kv_events == before.info.kv_events
        assert len(bus.outlets) == 1
        await until(lambda: outlet.numbers == [0, 1, 2])
        bodies = [body for _, body in outlet.sent]
        assert bodies[1] == b"", "its blocks are not those that it had"
        assert decode_batch(bodies[2]).events == (stored(1, 2),)
        assert await relay.announced(worker(second.source)) == after
        await relay.close()


async def test_each_rank_has_a_stream() -> None:
    bus = Bus()
    async with FakeEngine() as one, FakeEngine() as two:
        relay = EventRelay(bus, TIMES)
        both = evolve(one.source, further_ranks=(two.source,))
        announced = await relay.announced(worker(both, ranks=2))
        first, second = bus.outlets
        assert (first.stream.rank, second.stream.rank) == (0, 1)
        source = announced.info.kv_events
        assert source is not None
        assert [source.endpoint, source.further_ranks[0].endpoint] == ["noted:0", "noted:1"]
        await two.publish(stored(0, 1))
        await until(lambda: second.numbers == [0])
        assert first.numbers == []
        await relay.close()


async def test_on_zmq_front_doors_read_the_engine_itself() -> None:
    bus = ZmqEventBus()
    relay = EventRelay(bus)
    mine = worker(EventSource(endpoint="tcp://127.0.0.1:1"))
    assert await relay.announced(mine) == mine
    assert await relay.announced(worker(None)) == worker(None)
    await relay.close()
    await bus.close()


async def test_between_hosts_what_asks_for_no_proof_is_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorities = Authorities(tmp_path)
    with adopt(RunSecret.new()), on_a_network(monkeypatch, authorities.network("h1")):
        bus, door = ZmqEventBus(), ZmqEventBus()
        async with FakeEngine() as engine:
            relay = EventRelay(bus, TIMES)
            await engine.publish(stored(0, 1))
            announced = await relay.announced(worker(engine.source))
            source = announced.info.kv_events
            assert source is not None
            assert source.server_key is not None
            assert {source.endpoint, source.replay_endpoint}.isdisjoint(
                {engine.source.endpoint, engine.source.replay_endpoint}
            )
            reader = Reader(door, source)
            await until(lambda: reader.bodies == engine.log)
            await engine.publish(stored(1, 2))
            await until(lambda: reader.bodies == engine.log)
            late = Reader(door, source)
            await until(lambda: late.bodies == engine.log)
            for one in (reader, late):
                await one.subscriber.close()
            await relay.close()
        await door.close()
        await bus.close()


class Reader:
    """As a front door reads."""

    def __init__(self, bus: EventBus, source: EventSource) -> None:
        self.bodies: list[bytes] = []
        self.subscriber = EventSubscriber(bus, source, self, TIMES)
        self.subscriber.start()

    def message(self, body: bytes) -> None:
        self.bodies.append(body)

    def reset(self, reason: str) -> None:
        self.bodies.clear()

    def undecodable(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("tls", [True, False])
async def test_between_hosts_front_doors_read_publishers_of_ours_themselves(tls: bool) -> None:
    network = Network("c", "h1", "10.0.0.1", "10.0.0.1", TlsFiles("a", "b", "c") if tls else None)
    with use_network(network):
        bus = ZmqEventBus()
        relay = EventRelay(bus)
        source = EventSource(endpoint="tcp://10.0.0.1:1", server_key="k" if tls else None)
        assert await relay.announced(worker(source)) == worker(source)
        await relay.close()
        await bus.close()


async def test_sources_that_cannot_be_read_are_left_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = Bus()
    relay = EventRelay(bus)
    mine = worker(EventSource(endpoint="ipc:///without-a-port"), ranks=2)
    assert await relay.announced(mine) == mine
    assert "no port to count up from" in caplog.text
    await relay.close()
