"""Clients that vanish mid-stream leave nothing behind in the engines."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from http import HTTPStatus

import aiohttp
import pytest
from tests.e2e.conftest import MODEL

from commutator.contract.worker import EngineLoad
from commutator.engine.client import TokenApiClient
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


async def loads(clients: list[TokenApiClient]) -> list[EngineLoad]:
    return [await client.load() for client in clients]


async def short_answer_s(url: str) -> float:
    """What a request of one token takes on this machine, now: 1 s is meant beside that."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
    started_s = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        for _ in range(5):
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == HTTPStatus.OK
    return (time.perf_counter() - started_s) / 5


# A client that vanishes while it connects leaves its half-open socket to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_two_hundred_disconnects_leak_nothing(cluster: LocalCluster) -> None:
    rng = random.Random(4)
    engines = [TokenApiClient(address) for address in cluster.worker_addresses()]
    assert len(engines) == 2

    async def vanish(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{number} " * rng.randint(1, 60),
            "max_tokens": 400,
            "stream": rng.random() < 0.8,
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.6)):
                async with session.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    async for _ in answer.content:
                        pass
        except TimeoutError:
            pass

    connector = aiohttp.TCPConnector(force_close=True, limit=16)
    async with aiohttp.ClientSession(connector=connector) as session:
        for start in range(0, 200, 10):
            await asyncio.gather(*(vanish(session, i) for i in range(start, start + 10)))
    vanished_s = time.perf_counter()
    async with asyncio.timeout(60):
        while any(load.running or load.waiting for load in await loads(engines)):
            await asyncio.sleep(0.02)
    freed_s = time.perf_counter() - vanished_s
    assert freed_s < 1 + 5 * await short_answer_s(cluster.url)
    assert [load.kv_used_blocks for load in await loads(engines)] == [0, 0]
    for client in engines:
        await client.close()
    gc.collect()
