"""A front door that starts takes the prefix index of one of another host, by the hub."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.connections import Sent
from tests.unit.routing.fake_engine import SIZE, stored, until
from tests.unit.routing.test_index_sharing import knows, view_of, worker

from commutator.contract.block import BlockStored
from commutator.frontend.index_exchange import IndexExchangeClient, warmed
from commutator.registry.client import connect
from commutator.registry.hub import Hub
from commutator.registry.index_exchange import SERVICE, IndexExchange
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.prefix_index.snapshot import INDEX_SUFFIX, IndexSharing
from commutator_engine_kit import EventPublisher

MODEL = "m/0"


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    """An engine that keeps no more than its last two messages."""
    running = EventPublisher(keep_messages=2)
    yield running
    running.close()


@asynccontextmanager
async def hub() -> AsyncIterator[tuple[IndexExchange, str]]:
    registry, exchange = MemoryRegistry(), IndexExchange()
    server = RegistryServer(registry, [exchange])
    try:
        yield exchange, await server.start()
    finally:
        await server.stop()
        await registry.close()


def client_of(view: KvIndexer, folder: Path, address: str, silence_s: float = 30.0) -> Any:
    sharing = IndexSharing({MODEL: view}, folder / f"own{INDEX_SUFFIX}")
    return IndexExchangeClient(Hub(address, spans_hosts=True), sharing, silence_s)


@asynccontextmanager
async def offering(
    folder: Path, publisher: EventPublisher, exchange: IndexExchange, address: str
) -> AsyncIterator[KvIndexer]:
    """A front door of another host that has heard of a prompt of seven blocks."""
    async with view_of() as view:
        await view.add(worker(publisher))
        for blocks in range(1, 8):
            publisher.publish([stored(blocks - 1, blocks)])
            await knows(view, blocks)
        task = asyncio.create_task(client_of(view, folder, address).run())
        before = len(exchange.offers)
        await until(lambda: len(exchange.offers) > before)
        yield view
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_begins_with_what_workers_no_longer_repeat(
    tmp_path: Path, publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        hub() as (exchange, address),
        offering(tmp_path, publisher, exchange, address) as old,
        view_of() as new,
    ):
        await client_of(new, tmp_path, address).start_warm()
        assert "a front door of another host sent the prefix index of 1 workers, 7 blocks" in (
            caplog.text
        )
        await new.add(worker(publisher))
        assert new.index.snapshot("w") == old.index.snapshot("w") != []
        publisher.publish([stored(7, 8)])
        await knows(new, 8)
        await until(lambda: not exchange.asking)
    await until(lambda: not exchange.offers)


async def test_twelve_thousand_blocks_are_there_at_once(tmp_path: Path) -> None:
    """More than workers repeat."""
    blocks = 12_000
    publisher = EventPublisher(keep_messages=10_000)
    async with hub() as (exchange, address), view_of() as old, view_of() as new:
        await old.add(worker(publisher))
        for begin in range(0, blocks, 1000):
            for number in range(begin, begin + 1000):
                publisher.publish([alone(number)])
            await until(lambda: held(old) == begin + 1000, 300.0)  # noqa: B023 - at once
        offers = asyncio.create_task(client_of(old, tmp_path, address).run())
        await until(lambda: len(exchange.offers) == 1)
        await client_of(new, tmp_path, address).start_warm()
        await new.add(worker(publisher))
        assert held(new) == blocks
        assert new.index.snapshot("w") == old.index.snapshot("w")
        offers.cancel()
        await asyncio.gather(offers, return_exceptions=True)
    publisher.close()


def held(view: KvIndexer) -> int:
    return sum(view.index.blocks_by_worker().get("w", ()))


def alone(number: int) -> BlockStored:
    """A block of a prompt of its own."""
    return BlockStored(
        block_hashes=(number + 1,),
        parent_block_hash=None,
        token_ids=tuple(range(number, number + SIZE)),
        block_size=SIZE,
    )


async def test_the_first_front_door_finds_nobody_and_says_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub() as (_, address), view_of() as new:
        await client_of(new, tmp_path, address).start_warm()
    assert not caplog.records


async def test_a_door_that_is_lost_or_silent_is_left_for_the_next(
    tmp_path: Path, publisher: EventPublisher
) -> None:
    async with hub() as (exchange, address), view_of() as new:
        silent = await connect(address, lambda _: None, lambda: None)
        silent.send([SERVICE, "offer"])
        await until(lambda: len(exchange.offers) == 1)

        def vanish(_: list[Any]) -> None:
            vanishing.close()

        vanishing = await connect(address, vanish, lambda: None)
        vanishing.send([SERVICE, "offer"])
        await until(lambda: len(exchange.offers) == 2)
        async with offering(tmp_path, publisher, exchange, address):
            await client_of(new, tmp_path, address, silence_s=0.5).start_warm()
            assert [snapshot.worker_id for snapshot in taken(new)] == ["w"]
        silent.close()


def taken(view: KvIndexer) -> list[Any]:
    return list(view._restored.values())


async def test_without_a_hub_it_begins_alone(tmp_path: Path) -> None:
    async with view_of() as new:
        await client_of(new, tmp_path, "127.0.0.1:9", silence_s=0.2).start_warm()
        sharing = IndexSharing({MODEL: new}, tmp_path / f"own{INDEX_SUFFIX}")
        unknown = IndexExchangeClient(Hub(spans_hosts=True), sharing, 0.1)
        await unknown.start_warm()


async def test_an_index_is_taken_between_the_registry_s_answer_and_its_workers() -> None:
    order: list[str] = []

    class Noting(IndexExchangeClient):
        def __init__(self) -> None:
            pass

        async def start_warm(self) -> None:
            order.append("warm")

    async def batches() -> AsyncIterator[str]:
        for batch in ("first", "second"):
            order.append(f"got {batch}")
            yield batch

    async for batch in warmed(batches(), Noting()):
        order += [batch]
    assert order == ["got first", "warm", "first", "got second", "second"]
    assert [batch async for batch in warmed(batches(), None)] == ["first", "second"]


async def test_who_begins_hears_of_no_other_s_parts() -> None:
    exchange = IndexExchange()
    sent: dict[str, list[list[Any]]] = {"door": [], "one": [], "two": []}
    doors = {name: exchange.connected(Sent(frames.append)) for name, frames in sent.items()}
    takers = {name: door.on_frame for name, door in doors.items()}
    takers["door"]([SERVICE, "offer"])
    takers["one"]([SERVICE, "ask"])
    takers["two"]([SERVICE, "ask"])
    (_, _, first), (_, _, second) = sent["door"]
    assert first != second
    takers["door"]([SERVICE, "part", second, ["end"]])
    assert (sent["one"], sent["two"]) == ([], [[SERVICE, "part", ["end"]]])
    takers["two"]([SERVICE, "part", first, ["forged"]])
    assert sent["one"] == [], "only who was asked answers"
    doors["door"].on_lost()
    assert sent["one"] == [[SERVICE, "lost"]]
    takers["one"]([SERVICE, "ask"])
    assert sent["one"][1:] == [[SERVICE, "none"]]
    with pytest.raises(ValueError, match="unknown frame"):
        takers["one"]([SERVICE, "nonsense"])
