"""Workers are told where others of their model lend KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve

from commutator.engine import TokenApiClient
from commutator.errors import EngineUnavailableError
from commutator.runtime.kv_peers import KvPeers, peer_addresses
from commutator.runtime.registry import MemoryRegistry
from commutator.types import EngineInfo, KvExchange, WorkerRecord


def record(worker_id: str, address: str | None = None, model: str = "m") -> WorkerRecord:
    info = EngineInfo("fake", "1", model, 1, 1, 1, kv_exchange=KvExchange(address))
    return WorkerRecord(worker_id, "e", "fake", model, "h:1", info)


class FakeClient(TokenApiClient):
    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.told: list[list[str]] = []
        self.silent = False

    async def kv_admin(
        self, what: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0
    ) -> Any:
        if self.silent:
            raise EngineUnavailableError("silent")
        assert what == "peers"
        assert arguments is not None
        self.told.append(arguments["addresses"])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def test_only_others_of_the_same_model_that_lend() -> None:
    mine = record("w0", "tcp://h:1")
    none = evolve(record("w5"), info=EngineInfo("fake", "1", "m", 1, 1, 1))
    others = [
        mine,
        record("w2", "tcp://h:3"),
        record("w1", "tcp://h:2"),
        record("w3", "tcp://h:4", model="other"),
        record("w4"),
        none,
    ]
    assert peer_addresses(others, mine) == ["tcp://h:2", "tcp://h:3"]


async def test_a_worker_is_told_when_others_come_and_go() -> None:
    registry, peers, client = MemoryRegistry(), KvPeers(), FakeClient()
    mine = record("w0", "tcp://h:1")
    following = asyncio.create_task(peers.follow(registry))
    await registry.register(mine, 60.0)
    lease = await registry.register(record("w1", "tcp://h:2"), 60.0)
    await until(lambda: len(peers.live) == 2)
    await peers.tell(client, mine)
    await peers.tell(client, mine)
    assert client.told == [["tcp://h:2"]], "once"
    await registry.deregister(lease, "failed")
    await until(lambda: len(peers.live) == 1)
    client.silent = True
    await peers.tell(client, mine)
    client.silent = False
    await peers.tell(client, mine)
    assert client.told == [["tcp://h:2"], []], "again, since it failed"
    following.cancel()
    await registry.close()


async def test_a_new_process_is_told_again_and_others_not_at_all() -> None:
    registry, peers, client = MemoryRegistry(), KvPeers(), FakeClient()
    mine = record("w0")
    following = asyncio.create_task(peers.follow(registry))
    await registry.register(record("w1", "tcp://h:2"), 60.0)
    await until(lambda: len(peers.live) == 1)
    await peers.tell(client, mine)
    peers.started()
    await peers.tell(client, mine)
    assert client.told == [["tcp://h:2"]] * 2
    peers.started()
    await peers.tell(client, evolve(mine, info=evolve(mine.info, kv_exchange=None)))
    assert len(client.told) == 2
    following.cancel()
    await registry.close()
