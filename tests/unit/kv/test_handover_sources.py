"""Connections to prefill workers: those that are gone are forgotten, once, and no others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from commutator.contract.worker import KvTransferInfo
from commutator.errors import EngineUnavailableError
from commutator.trust import RunSecret, wire
from commutator_engine_kit.kv.transfer import sources as sources_module
from commutator_engine_kit.kv.transfer.protocol import ExportedMemory
from commutator_engine_kit.kv.transfer.sources import Connection, Sources


class Worker(Connection):
    """One connection; it takes a while to close."""

    def __init__(self, address: str, asked: asyncio.Event, answers: asyncio.Event) -> None:
        super().__init__(address)
        self._asked = asked
        self._answers = answers
        self.up = False
        self.closed = 0

    @property
    def connected(self) -> bool:
        return self.up

    async def start(self) -> None:
        self.up = True

    async def ask(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
        self._asked.set()
        await self._answers.wait()
        info = KvTransferInfo(
            protocol=self.address, identity="weights", block_size=4, token_bytes=8
        )
        return msgspec.to_builtins(ExportedMemory(info, self.address, b"", "DRAM", 0, 32, 100))

    async def close(self) -> None:
        self.up = False
        self.closed += 1
        await asyncio.sleep(0.05)


class Rig:
    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        """No worker answers while this is clear."""
        self.answers.set()
        self.forgotten: list[str] = []
        self.sources = Sources(
            self._connect,
            forget=lambda source: self.forgotten.append(source.agent),
            hello_timeout_s=1.0,
        )

    def _connect(self, address: str) -> Worker:
        self.workers.append(Worker(address, self.asked, self.answers))
        return self.workers[-1]

    async def use(self, *addresses: str) -> None:
        """Meet these for the first time."""
        for address in addresses:
            await self.sources.memory(address)

    def lose(self) -> None:
        for worker in self.workers:
            worker.up = False


async def test_the_lost_are_forgotten_once_by_the_first_that_comes() -> None:
    rig = Rig()
    await rig.use("a", "b", "c")
    rig.lose()
    await asyncio.gather(*(rig.use(address) for address in ("x", "y", "z")))
    assert sorted(rig.forgotten) == ["a", "b", "c"]
    assert [worker.closed for worker in rig.workers] == [1, 1, 1, 0, 0, 0]


async def test_a_worker_that_came_back_meanwhile_is_kept() -> None:
    rig = Rig()
    await rig.use("a", "b")
    rig.lose()
    first = asyncio.create_task(rig.use("x"))
    await asyncio.sleep(0.01)  # it closes "a"
    second = asyncio.create_task(rig.use("y"))
    await asyncio.sleep(0.01)  # this closes "b"
    await rig.use("b")
    again = rig.workers[-1]
    again.up = False
    await asyncio.gather(first, second)
    assert rig.forgotten == ["a", "b"]
    assert again.closed == 0, "the list of those to forget is older than it"


async def test_after_a_new_connection_the_memory_is_asked_for_anew() -> None:
    """A release had connected to the process that took the place of the first."""
    rig = Rig()
    await rig.use("a")
    rig.lose()
    await rig.sources.ask("a", "release", {}, object, timeout_s=1.0)
    (worker,) = rig.workers
    worker.address = "another process"
    assert (await rig.sources.memory("a")).agent == "another process"
    assert rig.forgotten == ["a"]


async def test_a_connection_that_is_lost_while_another_waits_for_it_is_closed_in_the_end() -> None:
    """The second hello is asked on the source that the first one would forget."""
    rig = Rig()
    rig.answers.clear()
    both = [asyncio.create_task(rig.use("a")) for _ in range(2)]
    await rig.asked.wait()
    rig.lose()
    rig.answers.set()
    await asyncio.gather(*both)
    assert [worker.up for worker in rig.workers] == [True]
    await rig.sources.close()
    assert not any(worker.up for worker in rig.workers)


async def test_who_waits_while_everything_is_closed_does_not_connect_again() -> None:
    rig = Rig()
    rig.answers.clear()
    both = [asyncio.create_task(rig.use("a")) for _ in range(2)]
    await rig.asked.wait()
    await rig.sources.close()
    rig.answers.set()
    _, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(second, EngineUnavailableError)
    assert not any(worker.up for worker in rig.workers)


async def test_who_gives_up_before_the_exporter_proves_itself_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look-up waits for a short time only, and a busy exporter is late."""
    made: list[asyncio.BaseTransport] = []
    connected = asyncio.Event()

    async def connect(
        protocol: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> asyncio.BaseTransport:
        made.append(await wire.connect(protocol, host, port))
        connected.set()
        return made[-1]

    monkeypatch.setattr(sources_module, "connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        starting = asyncio.create_task(Connection(address, secret=RunSecret.new()).start())
        await connected.wait()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert [transport.is_closing() for transport in made] == [True]
