"""What keys, limits and fairness cost: chats under load with all of them, and with none.

Both deployments run at the same time and are measured in turns, one right after the other, so that
both meet the same machine. Two that are alike still differ by some percent for as long as they run,
and whatever shares a machine makes turns differ. So such pairs are started one after another until
the mean of their ratios is certain to a percent, or there were many. In both, requests wait for
busy workers. The principals share one KV cache, as all clients do without keys: caches apart find
less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import attrs

from bench.load import FRONT_DOORS, LOAD, config
from bench.needs import needs_command
from bench.result import Figure
from bench.wrk import WRK, ChatLoad
from commutator.auth.keys import hash_of, new_key
from commutator.supervisor.local_cluster import LocalCluster

WORDS = (20, 400, 3000)
FEWEST_PAIRS, MOST_PAIRS = 8, 24
CERTAIN_TO = 0.01
"""Two standard errors of the mean ratio."""
TURNS = 2
"""Of each pair."""
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


class Rates(NamedTuple):
    """Requests a second of two deployments, in the mean of their turns."""

    plain: float
    keyed: float

    @property
    def log_ratio(self) -> float:
        return math.log(self.keyed / self.plain)


def run() -> list[Figure]:
    needs_command(*WRK)
    return [figure for front_doors in FRONT_DOORS for figure in compare(front_doors)]


def compare(front_doors: int) -> list[Figure]:
    pairs: dict[int, list[Rates]] = {words: [] for words in WORDS}
    for number in range(MOST_PAIRS):
        if number >= FEWEST_PAIRS and all(
            doubt(measured) <= CERTAIN_TO for measured in pairs.values()
        ):
            break
        with ExitStack() as open_:
            plain = LocalCluster(busy(config(front_doors), "fifo"))
            keyed = LocalCluster(with_keys(busy(config(front_doors), "weighted")))
            urls = open_.enter_context(plain).url, open_.enter_context(keyed).url
            for words in WORDS:
                pairs[words].append(measure(words, *urls))
    return [figure(words, front_doors, pairs[words]) for words in WORDS]


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


def measure(words: int, plain_url: str, keyed_url: str) -> Rates:
    plain = attrs.evolve(LOAD, words=words)
    runs: dict[str, ChatLoad] = {plain_url: plain, keyed_url: attrs.evolve(plain, keys=KEYS)}
    for url, load in runs.items():
        load.run(url, WARM_UP_S)
    rates: dict[str, list[float]] = {url: [] for url in runs}
    for number in range(TURNS):
        for url in sorted(runs, reverse=bool(number % 2)):
            rates[url].append(runs[url].run(url, TURN_S).rate)
    return Rates(statistics.mean(rates[plain_url]), statistics.mean(rates[keyed_url]))


def doubt(pairs: Sequence[Rates]) -> float:
    """Two standard errors of the mean ratio, as a part of it."""
    return 2 * statistics.stdev(pair.log_ratio for pair in pairs) / math.sqrt(len(pairs))


def figure(words: int, front_doors: int, pairs: Sequence[Rates]) -> Figure:
    plain = statistics.mean(pair.plain for pair in pairs)
    ratio = math.exp(statistics.mean(pair.log_ratio for pair in pairs))
    doors = f"{front_doors} front door{'s' if front_doors > 1 else ''}"
    return Figure(
        "keys",
        f"requests/s, {words:,} words, {doors}, ±{doubt(pairs):.1%}",
        ratio * plain,
        plain,
        "1/s",
        "without keys",
        ">= 0.95 of it",
    )
