"""Workers learn where others of their model lend KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from attrs import evolve

from commutator.contract.worker import EngineInfo, KvExchange, WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineUnavailableError
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.worker_agent import KvPeers


def record(worker_id: str, address: str | None = None, model: str = "m") -> WorkerRecord:
    info = EngineInfo(
        kind="fake",
        version="1",
        model=model,
        max_model_len=1,
        block_size=1,
        kv_capacity_blocks=1,
        kv_exchange=KvExchange(address=address),
    )
    return WorkerRecord(
        worker_id=worker_id, engine="e", kind="fake", model=model, address="h:1", info=info
    )


class FakeClient(TokenApiClient):
    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.told: list[list[str]] = []
        self.silent = False

    async def set_peers(self, addresses: Sequence[str], *, timeout_s: float = 5.0) -> None:
        if self.silent:
            raise EngineUnavailableError("silent")
        self.told.append(list(addresses))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def test_only_others_of_the_same_model_that_lend() -> None:
    mine = record("w0", "tcp://h:1")
    none = evolve(
        record("w5"),
        info=EngineInfo(
            kind="fake", version="1", model="m", max_model_len=1, block_size=1, kv_capacity_blocks=1
        ),
    )
    others = [
        mine,
        record("w2", "tcp://h:3"),
        record("w1", "tcp://h:2"),
        record("w3", "tcp://h:4", model="other"),
        record("w4"),
        none,
    ]
    registry, peers = MemoryRegistry(), KvPeers()
    for other in others:
        await registry.register(other, 60.0)
    following = asyncio.create_task(peers.follow(registry))
    await until(lambda: bool(peers.addresses(mine)))
    assert peers.addresses(mine) == ["tcp://h:2", "tcp://h:3"]
    following.cancel()
    await registry.close()


async def test_what_changes_while_a_worker_is_told_is_told_next() -> None:
    class Slow(FakeClient):
        async def set_peers(self, addresses: Sequence[str], *, timeout_s: float = 5.0) -> None:
            await super().set_peers(addresses)
            if len(self.told) == 1:
                await registry.register(record("w2", "tcp://h:3"), 60.0)
                await until(lambda: len(peers.addresses(mine)) == 2)

    registry, peers, client = MemoryRegistry(), KvPeers(), Slow()
    mine = record("w0", "tcp://h:1")
    following = asyncio.create_task(peers.follow(registry))
    await registry.register(record("w1", "tcp://h:2"), 60.0)
    await until(lambda: bool(peers.addresses(mine)))
    for _ in range(3):
        await peers.send(client, mine)
    assert client.told == [["tcp://h:2"], ["tcp://h:2", "tcp://h:3"]]
    following.cancel()
    await registry.close()


async def test_a_renewal_without_news_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of workers, and each renews its lease every second or two."""
    registry, peers, client = MemoryRegistry(), KvPeers(), FakeClient()
    mine = record("w0", "tcp://h:1")
    following = asyncio.create_task(peers.follow(registry))
    lender = record("w1", "tcp://h:2")
    await registry.register(lender, 60.0)
    await until(lambda: bool(peers.addresses(mine)))
    await peers.send(client, mine)
    monkeypatch.setattr(KvPeers, "addresses", None)
    await peers.send(client, mine)
    # A change of what it does not need is no news either.
    await registry.set_draining("w1", True)
    await peers.send(client, mine)
    assert client.told == [["tcp://h:2"]]
    following.cancel()
    await registry.close()


async def test_a_worker_hears_when_others_come_and_go() -> None:
    registry, peers, client = MemoryRegistry(), KvPeers(), FakeClient()
    mine = record("w0", "tcp://h:1")
    following = asyncio.create_task(peers.follow(registry))
    await registry.register(mine, 60.0)
    lease = await registry.register(record("w1", "tcp://h:2"), 60.0)
    await until(lambda: bool(peers.addresses(mine)))
    await peers.send(client, mine)
    await peers.send(client, mine)
    assert client.told == [["tcp://h:2"]], "once"
    await registry.deregister(lease, "failed")
    await until(lambda: not peers.addresses(mine))
    client.silent = True
    await peers.send(client, mine)
    client.silent = False
    await peers.send(client, mine)
    assert client.told == [["tcp://h:2"], []], "again, since it failed"
    following.cancel()
    await registry.close()


async def test_a_new_process_gets_its_peers_again_and_others_get_nothing() -> None:
    registry, peers, client = MemoryRegistry(), KvPeers(), FakeClient()
    mine = record("w0")
    following = asyncio.create_task(peers.follow(registry))
    await registry.register(record("w1", "tcp://h:2"), 60.0)
    await until(lambda: bool(peers.addresses(mine)))
    await peers.send(client, mine)
    peers.started()
    await peers.send(client, mine)
    assert client.told == [["tcp://h:2"]] * 2
    peers.started()
    await peers.send(client, evolve(mine, info=evolve(mine.info, kv_exchange=None)))
    assert len(client.told) == 2
    following.cancel()
    await registry.close()
