"""What keys, limits and fairness cost: chats under load with all of them, and with none.

Both deployments run at the same time and are measured in short turns, so that both meet the same
machine; the ratio is the median of those of neighbouring turns. Two deployments that are alike
differ by some percent for as long as they run, so several of each are started. In both, requests
wait for busy workers. The principals share one KV cache, as all clients do without keys: caches
apart find less.
"""

from __future__ import annotations

import statistics
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
DEPLOYMENTS = 8
TURNS = 4
"""With each deployment."""
TURN_S = 1
WARM_UP_S = 3
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


class Turn(NamedTuple):
    """Requests a second of both, one right after the other."""

    plain: float
    keyed: float


def run() -> list[Figure]:
    needs_command(*WRK)
    return [figure for front_doors in FRONT_DOORS for figure in compare(front_doors)]


def compare(front_doors: int) -> list[Figure]:
    turns: dict[int, list[Turn]] = {words: [] for words in WORDS}
    for _ in range(DEPLOYMENTS):
        with ExitStack() as open_:
            plain = LocalCluster(busy(config(front_doors), "fifo"))
            keyed = LocalCluster(with_keys(busy(config(front_doors), "weighted")))
            urls = open_.enter_context(plain).url, open_.enter_context(keyed).url
            for words in WORDS:
                turns[words] += measured(words, *urls)
    return [figure(words, front_doors, turns[words]) for words in WORDS]


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


def measured(words: int, plain_url: str, keyed_url: str) -> list[Turn]:
    plain = attrs.evolve(LOAD, words=words)
    runs: dict[str, ChatLoad] = {plain_url: plain, keyed_url: attrs.evolve(plain, keys=KEYS)}
    for url, load in runs.items():
        load.run(url, WARM_UP_S)
    turns = []
    for number in range(TURNS):
        rates = {
            url: runs[url].run(url, TURN_S).rate for url in sorted(runs, reverse=bool(number % 2))
        }
        turns.append(Turn(rates[plain_url], rates[keyed_url]))
    return turns


def figure(words: int, front_doors: int, turns: list[Turn]) -> Figure:
    without = statistics.median(turn.plain for turn in turns)
    ratio = statistics.median(turn.keyed / turn.plain for turn in turns)
    doors = f"{front_doors} front door{'s' if front_doors > 1 else ''}"
    return Figure(
        "keys",
        f"requests/s, {words:,} words, {doors}",
        ratio * without,
        without,
        "1/s",
        "without keys",
        ">= 0.95 of it",
    )
