"""A registry over TCP: what a lost connection, a lost server and a wrong frame do."""

from __future__ import annotations

import asyncio

import pytest

from commutator.contract.registry import WorkerDown, WorkerUp
from commutator.errors import RegistryError
from commutator.registry.client import RegistryClient
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator_testing.registries import RegistryWatcher, make_worker


async def test_a_watcher_outlives_the_server_and_hears_what_it_missed() -> None:
    inner = MemoryRegistry()
    await inner.register(make_worker("stays"), 60.0)
    gone = await inner.register(make_worker("goes"), 60.0)
    server = RegistryServer(inner)
    address = await server.start()
    client = RegistryClient(address)
    watcher = RegistryWatcher(client)
    assert len(await watcher.next()) == 2
    await server.stop()
    await asyncio.sleep(0.2)
    assert watcher.batches.empty(), "a lost registry must not empty the view"
    await inner.deregister(gone, "stopped")
    await inner.register(make_worker("new"), 60.0)
    again = RegistryServer(inner)
    await again.start(port=int(address.rpartition(":")[2]))
    assert await watcher.next() == [
        WorkerDown(worker_id="goes", reason="lease expired"),
        WorkerUp(record=make_worker("new")),
    ]
    watcher.task.cancel()
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
    inner = MemoryRegistry()
    server = RegistryServer(inner)
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x00\x00\x00\x05\x92\xa3bad")
    assert await reader.read() == b""
    writer.close()
    client = RegistryClient(f"{host}:{port}")
    assert await client.register(make_worker("a-0"), 60.0) == 1
    await client.close()
    await server.stop()
    await inner.close()
