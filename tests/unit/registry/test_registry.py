"""A registry over TCP: what a lost connection, a lost server and a wrong frame do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from commutator.contract.registry import WorkerDown, WorkerUp
from commutator.errors import RegistryError
from commutator.frames import FrameProtocol, pack
from commutator.registry import client as client_module
from commutator.registry.client import RegistryClient
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator_testing.registries import RegistryWatcher, make_worker, watching


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
    assert await client.keep_alive(await client.register(make_worker("a-0"), 60.0))
    await client.close()
    await server.stop()
    await inner.close()


@pytest.mark.security
@pytest.mark.parametrize(
    "frame",
    [
        ["snapshot", [{"worker_id": 1}]],
        ["snapshot", 7],
        ["changes", None],
        ["changes", [["up"]]],
        ["changes", [["down", 1, "x"]]],
        ["changes", [[]]],
        ["age", "x"],
        [None],
    ],
    ids=str,
)
async def test_a_watcher_outlives_what_is_no_frame_of_a_registry(frame: list[object]) -> None:
    """It connects again, and is told everything."""
    async with saying(frame, ["snapshot", []]) as address:
        client = RegistryClient(address)
        async with watching(client) as watcher:
            assert await watcher.next() == []
        await client.close()


@pytest.mark.security
async def test_an_answer_of_another_type_is_an_error_of_the_registry() -> None:
    async with saying(["answer", 1, {"no": "boolean"}]) as address:
        client = RegistryClient(address)
        with pytest.raises(RegistryError, match="Expected `bool`"):
            await client.keep_alive(1)
        await client.close()


async def test_first_questions_at_once_share_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, connect = list[FrameProtocol](), client_module.connect

    async def counted(*args: Any) -> FrameProtocol:
        connections.append(await connect(*args))
        return connections[-1]

    monkeypatch.setattr(client_module, "connect", counted)
    inner = MemoryRegistry()
    server = RegistryServer(inner)
    client = RegistryClient(await server.start())
    assert await asyncio.gather(*(client.keep_alive(lease) for lease in range(5))) == [False] * 5
    assert len(connections) == 1
    await client.close()
    await server.stop()
    await inner.close()


@asynccontextmanager
async def saying(*frames: list[object]) -> AsyncIterator[str]:
    """A server that answers the first question of each connection with the next of ``frames``."""
    left, answering = list(frames), set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        await reader.readexactly(4)
        writer.write(pack(left.pop(0)))
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    await asyncio.gather(*answering)
    server.close()
    await server.wait_closed()


async def test_a_lease_of_an_earlier_registry_is_none_of_the_next() -> None:
    """Otherwise a worker would renew another one's, and never register again."""
    earlier, later = MemoryRegistry(), MemoryRegistry()
    held = [await earlier.register(make_worker(name), 60.0) for name in ("a", "b", "c")]
    for name in ("c", "b", "a"):
        await later.register(make_worker(name), 60.0)
    assert not any([await later.keep_alive(lease) for lease in held])
    await earlier.close()
    await later.close()
