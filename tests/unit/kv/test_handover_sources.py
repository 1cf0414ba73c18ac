"""Connections to prefill workers: those that are gone are forgotten, once, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from commutator.contract.worker import KvTransferInfo
from commutator.kv.transfer.protocol import ExportedMemory
from commutator.kv.transfer.sources import Connection, Sources


class Worker(Connection):
    """One connection; it takes a while to close."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.up = False
        self.closed = 0

    @property
    def connected(self) -> bool:
        return self.up

    async def start(self) -> None:
        self.up = True

    async def ask(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
        info = KvTransferInfo(
            protocol=self.address, identity="weights", block_size=4, token_bytes=8
        )
        return msgspec.to_builtins(ExportedMemory(info, self.address, b"", "DRAM", 0, 32, 100))

    async def close(self) -> None:
        self.closed += 1
        await asyncio.sleep(0.05)


class Rig:
    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.forgotten: list[str] = []
        self.sources = Sources(
            self._connect,
            forget=lambda source: self.forgotten.append(source.agent),
            hello_timeout_s=1.0,
        )

    def _connect(self, address: str) -> Worker:
        self.workers.append(Worker(address))
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
