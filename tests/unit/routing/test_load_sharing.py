"""Front doors that share their load through a registry's server, which may fail them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from commutator.contract.routing import WorkerLoad
from commutator.frames import FrameProtocol
from commutator.registry.claims import HUB, PLANNER
from commutator.registry.client import connect
from commutator.registry.hub import Hub
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.routing.load import InFlightLoad
from commutator.routing.replica_sync import ReplicaSync, ShareTimes

TIMES = ShareTimes(interval_s=0.01, period_s=0.05, silence_s=0.25)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def share_until(
    condition: Callable[[], bool], peer: FrameProtocol, name: str, packed: dict[str, Any]
) -> None:
    """Repeat a message: front doors connect to the registry some time after they start."""
    async with asyncio.timeout(5):
        for number in count(1):
            peer.send(["share", name, number, packed])
            await asyncio.sleep(0.005)
            if condition():
                return


@asynccontextmanager
async def server(port: int = 0) -> AsyncIterator[str]:
    registry = MemoryRegistry()
    running = RegistryServer(registry)
    try:
        yield await running.start(port=port)
    finally:
        await running.stop()
        await registry.close()


@asynccontextmanager
async def front_door(name: str, address: str) -> AsyncIterator[InFlightLoad]:
    load = InFlightLoad()
    task = asyncio.create_task(ReplicaSync(name, load, Hub(address), TIMES).run())
    try:
        yield load
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_ends_when_it_is_cancelled_even_if_its_connection_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(ReplicaSync, "_announce_stop", fail)
    async with server() as address:
        load, other = InFlightLoad(), InFlightLoad()
        tasks = [
            asyncio.create_task(ReplicaSync(name, each, Hub(address), TIMES).run())
            for name, each in (("a", load), ("b", other))
        ]
        await until(lambda: load.peers == 1)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended] == [asyncio.CancelledError] * 2


async def test_front_doors_follow_the_hub_to_another_host() -> None:
    async with server() as first, server() as second:
        hubs = [Hub(spans_hosts=True) for _ in range(2)]
        loads = [InFlightLoad() for _ in hubs]
        tasks = [
            asyncio.create_task(ReplicaSync(f"door-{hub}", load, hub, TIMES).run())
            for hub, load in zip(hubs, loads, strict=True)
        ]
        hubs[0].on_claim(PLANNER, second)  # another name
        for address in (first, second, first):
            hubs[0].on_claim(HUB, address)
            await until(lambda: [load.peers for load in loads] == [0, 0])
            hubs[1].on_claim(HUB, address)
            await until(lambda: [load.peers for load in loads] == [1, 1])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_each_sees_what_the_others_have_in_flight() -> None:
    async with (
        server() as address,
        front_door("a", address) as a,
        front_door("b", address) as b,
        front_door("c", address) as c,
    ):
        await until(lambda: a.peers == b.peers == c.peers == 2)
        ticket = a.dispatch("w", 100, 16, cached_tokens=36)
        other = b.dispatch("w", 10, 16)
        await until(
            lambda: (
                c.of("w")
                == WorkerLoad(active_requests=2, active_prefill_tokens=74, active_decode_blocks=8)
            )
        )
        assert c.own("w") == WorkerLoad()
        await until(lambda: a.of("w") == b.of("w") == c.of("w"))
        a.progress(ticket, 5)
        await until(
            lambda: (
                c.of("w")
                == WorkerLoad(active_requests=2, active_prefill_tokens=10, active_decode_blocks=8)
            )
        )
        a.release(ticket)
        b.release(other)
        await until(lambda: c.of("w") == a.of("w") == b.of("w") == WorkerLoad())


async def test_many_changes_are_few_words() -> None:
    frames: list[list[Any]] = []
    async with server() as address, front_door("a", address) as a:
        listener = await connect(address, frames.append, lambda: None)
        listener.send(["share", "listener", 1, {}])
        await until(lambda: bool(frames))
        before, started_s = len(frames), time.monotonic()
        for _ in range(200):
            a.dispatch("w", 16, 16)
            await asyncio.sleep(0.001)
        await until(lambda: bool(frames) and frames[-1][3].get("w") == [200, 3200, 200])
        allowed = (time.monotonic() - started_s) / TIMES.interval_s + 2
        assert len(frames) - before <= allowed
        listener.close()


async def test_unchanged_load_is_repeated_only_now_and_then() -> None:
    frames: list[list[Any]] = []
    async with server() as address, front_door("a", address):
        listener = await connect(address, frames.append, lambda: None)
        listener.send(["share", "listener", 1, {}])
        await until(lambda: bool(frames))
        before, started_s = len(frames), time.monotonic()
        await until(lambda: len(frames) - before >= 4)
        assert time.monotonic() - started_s > 2 * TIMES.period_s
        listener.close()


async def test_a_silent_peer_is_dropped() -> None:
    freed: list[int] = []
    async with server() as address, front_door("a", address) as a:
        a.on_fall = lambda: freed.append(a.of("w").active_requests)
        peer = await connect(address, lambda _: None, lambda: None)
        load = WorkerLoad(active_requests=3, active_prefill_tokens=300, active_decode_blocks=20)
        await share_until(lambda: a.of("w") == load, peer, "peer", {"w": [3, 300, 20]})
        await until(lambda: a.peers == 0)
        assert a.of("w") == WorkerLoad()
        assert freed[-1] == 0, "requests that wait for a worker are tried again"
        peer.close()


async def test_a_front_door_that_stops_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with server() as address, front_door("a", address) as a:
        async with front_door("b", address) as b:
            b.dispatch("w", 16, 16)
            await until(lambda: a.of("w").active_requests == 1)
        await until(lambda: a.peers == 0)
        assert a.of("w") == WorkerLoad()
        await asyncio.sleep(TIMES.silence_s * 1.5)
    assert "silent" not in caplog.text


async def test_sharing_that_breaks_leaves_own_load_and_comes_back() -> None:
    async with server() as address:
        port = int(address.rpartition(":")[2])
        async with front_door("a", address) as a, front_door("b", address) as b:
            a.dispatch("w", 16, 16)
            await until(lambda: b.of("w").active_requests == 1)
    # The server is gone; so are both front doors. Now they come before it does.
    async with front_door("a", address) as a, front_door("b", address) as b:
        a.dispatch("w", 16, 16)
        await asyncio.sleep(0.2)
        assert (a.of("w").active_requests, b.of("w").active_requests) == (1, 0)
        async with server(port):
            await until(lambda: b.of("w").active_requests == 1)
        await until(lambda: b.of("w").active_requests == 0)
        assert a.of("w").active_requests == 1


@pytest.mark.parametrize("packed", [{"w": [1, 2]}, {"w": [-1, 0, 0]}, {"w": "many"}])
async def test_nonsense_is_reported_and_not_counted(
    packed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with server() as address, front_door("a", address) as a:
        peer = await connect(address, lambda _: None, lambda: None)
        reported = "odd sent a load that cannot be read"
        await share_until(lambda: reported in caplog.text, peer, "odd", packed)
        assert a.peers == 0
        peer.close()


async def test_a_peer_that_does_not_read_costs_no_memory() -> None:
    running = RegistryServer(MemoryRegistry())
    address = await running.start()
    slow = await connect(address, lambda _: None, lambda: None)
    slow.send(["share", "slow", 1, {}])
    await until(lambda: any(connection.shares for connection in running.connections))
    assert slow.transport is not None
    slow.transport.pause_reading()
    busy = await connect(address, lambda _: None, lambda: None)
    word = {f"worker-{i}": [1, 1, 1] for i in range(1000)}
    for number in range(1500):
        busy.send(["share", "busy", number, word])
        await asyncio.sleep(0)
    await until(lambda: busy.unsent_bytes == 0)
    await asyncio.sleep(0.1)
    kept: list[FrameProtocol] = [connection.frames for connection in running.connections]
    assert max(frames.unsent_bytes for frames in kept) < 200_000
    slow.close()
    busy.close()
    await running.stop()
    await running.registry.close()
