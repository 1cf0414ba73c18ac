"""Two front doors on one port: one is killed under load, comes back, and is warm again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from commutator.testing import LocalCluster

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"


def front_doors(cluster: LocalCluster) -> dict[str, int]:
    """The socket of each front door, and its process."""
    assert cluster.process is not None
    found = {}
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        command = process.cmdline()
        if "commutator.runtime.frontend_process" in command:
            found[command[-1]] = process.pid
    return found


async def health(socket: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
        session.get("http://front-door/health") as answer,
    ):
        found: dict[str, Any] = await answer.json()
        return found


async def indexed(socket: str) -> int:
    blocks: int = (await health(socket))["indexed_blocks"][MODEL]
    return blocks


async def load(url: str, stop: asyncio.Event, lost: list[BaseException], done: list[int]) -> None:
    """One client: a new connection for each request, so that both front doors are used."""
    number = 0
    while not stop.is_set():
        number += 1
        body = {"model": MODEL, "prompt": f"{id(stop)} {number} " * 40, "max_tokens": 8}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/completions", json=body) as answer,
            ):
                await answer.read()
                done.append(answer.status)
        except aiohttp.ClientError as error:
            lost.append(error)


async def test_a_killed_front_door_is_warm_again_within_two_seconds(root: Path) -> None:
    with LocalCluster(root / "examples" / "scale.yaml") as cluster:
        before = front_doors(cluster)
        assert len(before) == 2
        stop, lost, done = asyncio.Event(), list[BaseException](), list[int]()
        clients = [asyncio.create_task(load(cluster.url, stop, lost, done)) for _ in range(8)]
        await asyncio.sleep(3)
        victim, survivor = sorted(before)
        os.kill(before[victim], signal.SIGKILL)
        await asyncio.sleep(0.1)
        while front_doors(cluster).get(victim) in (None, before[victim]):
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            while True:  # it answers again
                try:
                    await health(victim)
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
        back_s = time.monotonic()
        stop.set()
        await asyncio.gather(*clients)
        while await indexed(victim) != await indexed(survivor) or not await indexed(survivor):
            assert time.monotonic() - back_s < 2, "not warm within two seconds"
            await asyncio.sleep(0.05)
        # Only what was on the killed process's own connections is lost.
        assert len(lost) <= len(clients)
        assert set(done) == {200}
        assert len(done) > 20
