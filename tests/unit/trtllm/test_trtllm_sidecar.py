"""A sidecar reads its server's queues for all clients, also after failures of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.trtllm.fake_source import BLOCK, FakeSource, sidecar_of, until_ready
from tests.support.trtllm.queues import EventQueue, StatisticsQueue
from tests.support.trtllm.server import StandIn
from tests.unit.routing.fake_engine import record

from commutator.contract.block import BlockRemoved, BlockStored
from commutator.contract.routing import RouterConfig
from commutator.contract.worker import EngineLoad
from commutator.errors import EngineUnavailableError
from commutator.launcher.ports import free_ports
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator_engine_kit.http import HttpServer
from commutator_trtllm.client import TrtllmClient
from commutator_trtllm.sidecar import Sidecar, SidecarOptions

NAME = (1 << 63) + 12345


def block(*tokens: int, name: int, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=(name,), parent_block_hash=parent, token_ids=tokens, block_size=BLOCK
    )


def hash_of(*tokens: int) -> int:
    return sequence_hashes(tokens, BLOCK)[-1]


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.proves("trtllm", "KV events: the index is what the server holds", how="stand-in")
async def test_events_fill_the_index() -> None:
    async with sidecar_of(FakeSource()) as (client, _, events):
        subscriber = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK))
        index = subscriber.index
        await subscriber.add(record("w", await client.start()))
        events.publish([block(1, 2, 3, 4, name=NAME)])
        await until(lambda: index.holds("w", hash_of(1, 2, 3, 4)))
        events.publish([block(5, 6, 7, 8, name=7, parent=NAME), BlockRemoved(block_hashes=(7,))])
        events.publish([block(9, 9, 9, 9, name=8, parent=NAME)])
        await until(lambda: index.holds("w", hash_of(1, 2, 3, 4, 9, 9, 9, 9)))
        assert not index.holds("w", hash_of(1, 2, 3, 4, 5, 6, 7, 8))
        await subscriber.close()


async def test_missing_events_drop_what_was_known() -> None:
    async with sidecar_of(FakeSource()) as (client, _, events):
        subscriber = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK))
        index = subscriber.index
        await subscriber.add(record("w", await client.start()))
        events.publish([block(1, 2, 3, 4, name=1)])
        await until(lambda: index.holds("w", hash_of(1, 2, 3, 4)))
        next(events._numbers)  # as if another reader had taken one
        events.publish([block(5, 6, 7, 8, name=2)])
        await until(lambda: index.holds("w", hash_of(5, 6, 7, 8)))
        assert not index.holds("w", hash_of(1, 2, 3, 4))
        await subscriber.close()


async def test_a_restarted_server_is_another_one() -> None:
    """The client finds it again, and the index has the blocks of the new server only."""
    (port,) = free_ports("127.0.0.1")
    options = SidecarOptions(url=f"http://127.0.0.1:{port}", max_model_len=64)
    subscriber = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK))
    index = subscriber.index
    async with Sidecar(options).running() as address:
        client = TrtllmClient(address)
        with pytest.raises(EngineUnavailableError):
            await client.start()
        for life in (1, 2):
            events = EventQueue()
            stand_in = StandIn(FakeSource(), events, StatisticsQueue(BLOCK), wait_s=0.02)
            async with stand_in.running(port=port):
                await until_ready(address)
                info = await client.start()
                await client.check_health()
                if life == 1:
                    await subscriber.add(record("w", info))
                tokens = (life,) * BLOCK
                events.publish([block(*tokens, name=life)])
                await until(lambda tokens=tokens: index.holds("w", hash_of(*tokens)))  # type: ignore[misc]
            with pytest.raises(EngineUnavailableError):
                await client.check_health()
        assert not index.holds("w", hash_of(*(1,) * BLOCK))
        await client.close()
        await subscriber.close()


async def test_load_is_that_of_the_last_step() -> None:
    source = FakeSource()
    async with sidecar_of(source) as (client, _, _):
        source.running = 5
        loads: list[EngineLoad] = []
        async with asyncio.timeout(60):
            while not loads or loads[-1].running != 5:
                loads.append(await client.load())
        assert loads[-1] == EngineLoad(running=5, kv_used_blocks=3, kv_capacity_blocks=9)


async def test_a_server_without_statistics_is_reported_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StatisticsQueue, "take", lambda _: [])
    monkeypatch.setattr("commutator_trtllm.sidecar._STATISTICS_TRIES", 2)
    stand_in = StandIn(FakeSource(), EventQueue(), StatisticsQueue(BLOCK), wait_s=0.01)
    async with stand_in.running() as url:
        options = SidecarOptions(url=url, max_model_len=64)
        async with Sidecar(options).running() as address:
            client, said = TrtllmClient(address), ""
            async with asyncio.timeout(60):
                while "enable_iter_perf_stats" not in said:
                    with pytest.raises(EngineUnavailableError) as caught:
                        await client.start()
                    said = str(caught.value)
                    await asyncio.sleep(0.02)
            await client.close()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (EngineUnavailableError("no answer"), "no answer"),
        (ZeroDivisionError("oh"), "ZeroDivisionError"),
    ],
)
async def test_whatever_happens_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, broken: Exception, said: str
) -> None:
    async with sidecar_of(FakeSource()) as (client, _, _):
        with monkeypatch.context() as patched:
            ask = HttpServer.ask

            async def fail(server: HttpServer, path: str, **options: Any) -> bytes:
                if server.url == client.address:
                    return await ask(server, path, **options)
                raise broken

            patched.setattr(HttpServer, "ask", fail)
            told = ""
            async with asyncio.timeout(60):
                while said not in told:
                    await asyncio.sleep(0.01)
                    told = await _told(client)
        await until_ready(client.address)
        await client.load()


async def test_it_ends_even_if_the_server_is_lost_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost_when_cancelled(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise EngineUnavailableError("Connection refused")

    monkeypatch.setattr(Sidecar, "_read_statistics", lost_when_cancelled)
    async with asyncio.timeout(60), sidecar_of(FakeSource()) as (client, _, _):
        await client.load()


async def _told(client: TrtllmClient) -> str:
    try:
        await client.load()
    except EngineUnavailableError as error:
        return str(error)
    return ""


async def test_without_events_or_hand_overs_it_says_so() -> None:
    stand_in = StandIn(FakeSource(), EventQueue(), StatisticsQueue(BLOCK), wait_s=0.02)
    async with stand_in.running() as url:
        options = SidecarOptions(url=url, max_model_len=64, kv_events=False)
        async with Sidecar(options).running() as address:
            await until_ready(address)
            client = TrtllmClient(address)
            info = await client.start()
            assert (info.kv_events, info.handover) == (None, None)
            await client.close()
