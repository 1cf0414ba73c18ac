"""The registry in memory and over TCP keep the same contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import evolve

from commutator.errors import RegistryError
from commutator.runtime.lease import Change, Down, Up
from commutator.runtime.registry import MemoryRegistry, Registry
from commutator.runtime.registry_client import RegistryClient
from commutator.runtime.registry_server import RegistryServer
from commutator.types import EngineInfo, EventSource, Role, WorkerRecord


def record(worker_id: str, port: int = 1) -> WorkerRecord:
    events = EventSource("tcp://127.0.0.1:1", topic="kv")
    info = EngineInfo("fake", "1", "m", 128, 16, 100, kv_events=events, pid=7)
    return WorkerRecord(worker_id, "e", "fake", "m", f"127.0.0.1:{port}", info, role=Role.DECODE)


@asynccontextmanager
async def memory() -> AsyncIterator[Registry]:
    registry = MemoryRegistry()
    yield registry
    await registry.close()


@asynccontextmanager
async def tcp() -> AsyncIterator[Registry]:
    async with memory() as inner:
        server = RegistryServer(inner)
        client = RegistryClient(await server.start())
        yield client
        await client.close()
        await server.stop()


BOTH = pytest.mark.parametrize("make", [memory, tcp])


class Watcher:
    """Collects batches in the background."""

    def __init__(self, registry: Registry) -> None:
        self.batches: asyncio.Queue[Sequence[Change]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(registry))

    async def _run(self, registry: Registry) -> None:
        async for batch in registry.watch():
            self.batches.put_nowait(batch)

    async def next(self, timeout_s: float = 3.0) -> list[Change]:
        async with asyncio.timeout(timeout_s):
            return list(await self.batches.get())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@BOTH
async def test_a_watcher_gets_what_is_there_and_then_what_changes(make: type) -> None:
    async with make() as registry:
        await registry.register(record("a-0"), 60.0)
        watcher = Watcher(registry)
        assert await watcher.next() == [Up(record("a-0"))]
        lease = await registry.register(record("a-1"), 60.0)
        assert await watcher.next() == [Up(record("a-1"))]
        await registry.deregister(lease, "stopped")
        assert await watcher.next() == [Down("a-1", "stopped")]
        await registry.register(record("a-0", port=2), 60.0)
        assert await watcher.next() == [Down("a-0", "failed"), Up(record("a-0", port=2))]
        await watcher.close()


@BOTH
async def test_the_first_batch_comes_even_when_there_is_nothing(make: type) -> None:
    async with make() as registry:
        watcher = Watcher(registry)
        assert await watcher.next() == []
        await watcher.close()


@BOTH
async def test_a_lease_that_is_not_kept_alive_lapses_by_itself(make: type) -> None:
    async with make() as registry:
        watcher = Watcher(registry)
        await watcher.next()
        lease = await registry.register(record("a-0"), 0.3)
        assert await watcher.next() == [Up(record("a-0"))]
        for _ in range(4):
            await asyncio.sleep(0.1)
            assert await registry.keep_alive(lease)
        assert watcher.batches.empty()
        assert await watcher.next() == [Down("a-0", "lease expired")]
        assert not await registry.keep_alive(lease)
        await watcher.close()


@BOTH
async def test_a_drained_worker_stays_drained_until_it_is_said_otherwise(make: type) -> None:
    async with make() as registry:
        assert not await registry.set_draining("a-0", True), "there is no such worker"
        await registry.register(record("a-0"), 60.0)
        watcher = Watcher(registry)
        await watcher.next()
        assert await registry.set_draining("a-0", True)
        drained = evolve(record("a-0"), draining=True)
        assert await watcher.next() == [Up(drained)]
        await registry.register(record("a-0", port=2), 60.0)
        again = evolve(record("a-0", port=2), draining=True)
        assert await watcher.next() == [Down("a-0", "failed"), Up(again)]
        assert await registry.set_draining("a-0", False)
        assert await watcher.next() == [Up(record("a-0", port=2))]
        await watcher.close()


@BOTH
async def test_a_role_stays_until_it_is_changed_again(make: type) -> None:
    async with make() as registry:
        assert not await registry.set_role("a-0", Role.PREFILL), "there is no such worker"
        await registry.register(record("a-0"), 60.0)
        watcher = Watcher(registry)
        await watcher.next()
        assert await registry.set_role("a-0", Role.PREFILL)
        assert await watcher.next() == [Up(evolve(record("a-0"), role=Role.PREFILL))]
        await registry.register(record("a-0", port=2), 60.0)
        again = evolve(record("a-0", port=2), role=Role.PREFILL)
        assert await watcher.next() == [Down("a-0", "failed"), Up(again)]
        assert await registry.set_role("a-0", Role.DECODE)
        assert await watcher.next() == [Up(record("a-0", port=2))]
        await watcher.close()


async def test_a_watcher_outlives_the_server_and_hears_what_it_missed() -> None:
    inner = MemoryRegistry()
    await inner.register(record("stays"), 60.0)
    gone = await inner.register(record("goes"), 60.0)
    server = RegistryServer(inner)
    address = await server.start()
    client = RegistryClient(address)
    watcher = Watcher(client)
    assert len(await watcher.next()) == 2
    await server.stop()
    await asyncio.sleep(0.2)
    assert watcher.batches.empty(), "a lost registry must not empty the view"
    await inner.deregister(gone, "stopped")
    await inner.register(record("new"), 60.0)
    again = RegistryServer(inner)
    await again.start(port=int(address.rpartition(":")[2]))
    assert await watcher.next() == [Down("goes", "lease expired"), Up(record("new"))]
    await watcher.close()
    await client.close()
    await again.stop()
    await inner.close()


async def test_an_unreachable_registry_is_an_error_of_its_own() -> None:
    server = RegistryServer(MemoryRegistry())
    address = await server.start()
    await server.stop()
    with pytest.raises(RegistryError, match="registry at 127"):
        await RegistryClient(address).keep_alive(1)


async def test_a_wrong_frame_ends_only_its_own_connection() -> None:
    async with memory() as inner:
        server = RegistryServer(inner)
        host, _, port = (await server.start()).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\x00\x00\x05\x92\xa3bad")
        assert await reader.read() == b""
        writer.close()
        client = RegistryClient(f"{host}:{port}")
        assert await client.register(record("a-0"), 60.0) == 1
        await client.close()
        await server.stop()
