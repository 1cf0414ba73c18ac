"""What keys, limits and fairness cost: chats under load with all of them, and with none.

Both deployments run at the same time and are measured in turns, so that both meet the same machine.
The principals share one KV cache, as all clients do without keys: caches apart find less.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import attrs

from bench.load import FRONT_DOORS, LOAD, config
from bench.needs import needs_command
from bench.result import Figure
from bench.wrk import WRK, ChatLoad
from commutator.auth.keys import hash_of, new_key
from commutator.supervisor.local_cluster import LocalCluster

WORDS = (20, 400, 3000)
ROUNDS = 5
SECONDS = 4
KEYS = [new_key() for _ in range(20)]
MAX_ACTIVE = 12
"""Requests at a worker; clients are more, so requests wait and fairness decides."""
LIMITS = {
    "requests_per_minute": 100_000_000,
    "tokens_per_minute": 100_000_000_000,
    "tokens_per_day": 100_000_000_000,
    "concurrent_requests": 10_000,
    "answers": 8,
    "max_model_len": 8192,
}


def run() -> list[Figure]:
    needs_command(*WRK)
    return [figure for front_doors in FRONT_DOORS for figure in compare(front_doors)]


def compare(front_doors: int) -> list[Figure]:
    with ExitStack() as open_:
        plain = open_.enter_context(LocalCluster(config(front_doors)))
        keyed = open_.enter_context(LocalCluster(with_keys(config(front_doors))))
        return [figure(words, front_doors, plain.url, keyed.url) for words in WORDS]


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
    return {
        **plain,
        "auth": [{"kind": "keys", "principals": principals}],
        "router": {
            **plain["router"],
            "busy": {"max_active_requests": MAX_ACTIVE, "fairness": {"kind": "weighted"}},
        },
    }


def figure(words: int, front_doors: int, plain_url: str, keyed_url: str) -> Figure:
    plain = attrs.evolve(LOAD, words=words)
    runs: dict[str, ChatLoad] = {plain_url: plain, keyed_url: attrs.evolve(plain, keys=KEYS)}
    for url, load in runs.items():
        load.run(url, SECONDS)
    rates: dict[str, list[float]] = {url: [] for url in runs}
    for number in range(ROUNDS):
        for url in sorted(runs, reverse=bool(number % 2)):
            rates[url].append(runs[url].run(url, SECONDS).rate)
    doors = f"{front_doors} front door{'s' if front_doors > 1 else ''}"
    return Figure(
        "keys",
        f"requests/s, {words:,} words, {doors}",
        statistics.median(rates[keyed_url]),
        statistics.median(rates[plain_url]),
        "1/s",
        "without keys",
        ">= 0.95 of it",
    )
