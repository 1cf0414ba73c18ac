"""What keys, limits and fairness cost: chats under load with all of them, and with none.

Both deployments run at the same time and are measured one right after the other, so that both meet
the same machine. Two that are alike still differ by some percent for as long as they run, so many
such pairs are started; each figure is the mean of their ratios, with two standard errors of it. The
last figure, of all pairs, is the most certain one. In both, requests wait for busy workers. The
principals share one KV cache, as all clients do without keys: caches apart find less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import attrs

from bench.load import FRONT_DOORS, LOAD, config, until_idle
from bench.needs import needs_command
from bench.result import Figure
from bench.wrk import WRK
from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

WORDS = (20, 400, 3000)
CONNECTIONS = (32, 512)
PAIRS = 12
TURN_S = 3
"""As `bench load`."""
WARM_UP_S = 1
KEYS = [new_key() for _ in range(20)]
MAX_ACTIVE = 12
"""Requests at a worker; clients are more, so that requests wait."""
LIMITS = {
    "requests_per_minute": 100_000_000,
    "tokens_per_minute": 100_000_000_000,
    "tokens_per_day": 100_000_000_000,
    "concurrent_requests": 10_000,
    "answers": 8,
    "max_model_len": 8192,
}


class Pair(NamedTuple):
    """Requests a second of two deployments."""

    plain: float
    keyed: float

    @property
    def log_ratio(self) -> float:
        return math.log(self.keyed / self.plain)


def run() -> list[Figure]:
    needs_command(*WRK)
    figures: list[Figure] = []
    every: list[Pair] = []
    for front_doors in FRONT_DOORS:
        doors = f"{front_doors} front door{'s' if front_doors > 1 else ''}"
        for (words, connections), pairs in compare(front_doors).items():
            what = f"{words:,} words, {connections} connections, {doors}"
            figures.append(figure(what, pairs))
            every += pairs
    return [*figures, figure("all of these", every)]


def compare(front_doors: int) -> dict[tuple[int, int], list[Pair]]:
    """Pairs by the words of a prompt and the number of connections."""
    plain, keyed = busy(config(front_doors), "fifo"), busy(config(front_doors), "weighted")
    deployments = {
        "plain": (plain, LOAD),
        "keyed": (with_keys(keyed), attrs.evolve(LOAD, keys=KEYS)),
    }
    pairs: dict[tuple[int, int], list[Pair]] = {case: [] for case in product(WORDS, CONNECTIONS)}
    for number in range(PAIRS):
        # Each is started, and measured, as often before the other as after it.
        names = sorted(deployments, reverse=bool(number % 2))
        with ExitStack() as open_:
            urls = {
                name: open_.enter_context(LocalCluster(deployments[name][0])).url for name in names
            }
            for (words, connections), found in pairs.items():
                loads = {
                    name: attrs.evolve(load, words=words, concurrency=connections)
                    for name, (_, load) in deployments.items()
                }
                rates = {}
                for duration_s in (WARM_UP_S, TURN_S):
                    for name in names:
                        rates[name] = loads[name].run(urls[name], duration_s).rate
                        until_idle()
                found.append(Pair(**rates))
    return pairs


def busy(plain: dict[str, Any], fairness: str) -> dict[str, Any]:
    waiting = {"max_active_requests": MAX_ACTIVE, "fairness": {"kind": fairness}}
    return {**plain, "router": {**plain["router"], "busy": waiting}}


def with_keys(plain: dict[str, Any]) -> dict[str, Any]:
    principals = [
        {
            "name": f"p{number}",
            "weight": 1 + number % 3,
            "cache_salt": "all",
            "limits": LIMITS,
            "keys": [{"sha256": hash_of(key)}],
        }
        for number, key in enumerate(KEYS)
    ]
    return {**plain, "auth": [{"kind": "keys", "principals": principals}]}


def figure(what: str, pairs: Sequence[Pair]) -> Figure:
    logs = [pair.log_ratio for pair in pairs]
    plain = statistics.mean(pair.plain for pair in pairs)
    doubt = 2 * statistics.stdev(logs) / math.sqrt(len(logs))
    return Figure(
        "keys",
        f"requests/s, {what}; ratio ±{doubt:.3f}",
        math.exp(statistics.mean(logs)) * plain,
        plain,
        "1/s",
        "without keys",
        ">= 0.95 of it",
    )
