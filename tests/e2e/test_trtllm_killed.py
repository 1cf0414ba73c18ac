"""A stand-in of TensorRT-LLM's server is killed while prefill and decode are apart.

Whichever it is: every client gets its whole answer, no leg goes on at the servers that live, and
the killed one comes back and serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from attrs import frozen
from tests.support.launched_servers import kill_server_at, server_urls, wait_for_workers
from tests.support.oracle import SOURCE
from tests.support.trtllm.cluster import SERVE, launched, load_of

from commutator.errors import EngineError
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

WAIT_S = 600.0
SERVERS = {"p-0", "d-0", "d-1"}
PROMPT_TOKENS = 300
NEW_TOKENS = 24
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": SOURCE, "max_model_len": 1024}],
    "engines": [
        launched(SOURCE, name="p", role="prefill"),
        launched(SOURCE, name="d", role="decode", replicas=2),
    ],
    "disaggregation": {"kind": "always", "timeout_s": WAIT_S},
    "migration": {"wait_s": WAIT_S},
    "frontend": {"request_timeout_s": 2 * WAIT_S},
    "runtime": {"lease_s": 60, "restart_backoff_s": 0.1},  # a busy machine loses no worker
}


@frozen
class Answer:
    text: str
    decision: dict[str, Any]
    """What the front door says of it."""

    @property
    def from_elsewhere(self) -> bool:
        """Whether the KV came from the prefill server."""
        return bool(self.decision["disaggregation"]["outcome"] == "handed over")

    @property
    def lost(self) -> set[str]:
        """The servers that failed it."""
        failed = self.decision["disaggregation"].get("failed", ())
        moved = self.decision.get("migrations", ())
        return {one["prefill_worker"] for one in failed} | {one["from_worker"] for one in moved}


@pytest.fixture(scope="module")
def apart() -> Iterator[LocalCluster]:
    with LocalCluster(DEPLOYMENT, start_timeout_s=WAIT_S) as running:
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=2 * WAIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as made:
        yield made


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await what():
            await asyncio.sleep(0.02)


async def says(cluster: LocalCluster, worker: str, *, busy: bool) -> bool:
    """Whether that is the server's own account of itself."""
    with suppress(LookupError, EngineError):
        load = await load_of(cluster, worker)
        return bool(load.running or load.waiting) == busy
    return False


async def undisturbed(cluster: LocalCluster) -> None:
    """All servers are there, and none has anything to do."""
    await asyncio.to_thread(wait_for_workers, cluster, len(SERVERS))

    async def idle() -> bool:
        return all([await says(cluster, worker, busy=False) for worker in SERVERS])

    await until(idle)


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> Answer:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"X-Commutator-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["X-Commutator-Decision"])
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
    return Answer(answer["choices"][0]["text"], decision)


async def all_of(session: aiohttp.ClientSession, url: str, first_token: int) -> list[Answer]:
    """Four prompts that have nothing in common with others but what they are made of."""
    prompts = [
        [first_token + number, *range(1000 * number, 1000 * number + PROMPT_TOKENS)]
        for number in range(1, 5)
    ]
    return await asyncio.gather(*(complete(session, url, prompt) for prompt in prompts))


async def killed_under_way(
    session: aiohttp.ClientSession, cluster: LocalCluster, victim: str
) -> list[Answer]:
    """The answers that were at the victim; afterwards all is as before."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        await undisturbed(cluster)
        first_token = int.from_bytes(os.urandom(2)) % 40000  # nothing of these is cached
        asking = asyncio.create_task(all_of(session, cluster.url, first_token))

        async def reached(asked: asyncio.Task[list[Answer]] = asking) -> bool:
            return asked.done() or await says(cluster, victim, busy=True)

        await until(reached)
        await asyncio.to_thread(kill_server_at, cluster, server_urls(cluster, SERVE.name)[victim])
        answers = await asking
        await undisturbed(cluster)
        again = await all_of(session, cluster.url, first_token)
        same = [one.text == other.text for one, other in zip(answers, again, strict=True)]
        assert sum(same) >= len(same) - 1, "two tokens may be as likely, in other batches otherwise"
        if moved := [answer for answer in answers if victim in answer.lost]:
            print(f"{victim} was lost by {len(moved)} of {len(answers)} requests, 0 failed")
            return moved
    raise AssertionError("all answers were at their end before each kill")


async def serves(session: aiohttp.ClientSession, cluster: LocalCluster, worker: str) -> None:
    """It takes part in hand-overs again."""

    async def again() -> bool:
        first_token = int.from_bytes(os.urandom(2)) % 40000
        answers = await all_of(session, cluster.url, first_token)
        return any(
            answer.from_elsewhere
            and worker
            in {
                answer.decision["worker_id"],
                answer.decision["disaggregation"]["prefill_worker_id"],
            }
            for answer in answers
        )

    await until(again)


@pytest.mark.proves("trtllm", "prefill and decode apart: one side killed", how="stand-in")
async def test_the_prefill_server_is_killed(
    session: aiohttp.ClientSession, apart: LocalCluster
) -> None:
    """Its prompts are computed where they are decoded."""
    moved = await killed_under_way(session, apart, "p-0")
    assert not any(answer.from_elsewhere for answer in moved)
    await serves(session, apart, "p-0")


@pytest.mark.proves("trtllm", "prefill and decode apart: one side killed", how="stand-in")
async def test_a_decode_server_is_killed(
    session: aiohttp.ClientSession, apart: LocalCluster
) -> None:
    """Its answers go on at the other one."""
    moved = await killed_under_way(session, apart, "d-0")
    assert {answer.decision["migrations"][-1]["to_worker"] for answer in moved} == {"d-1"}
    await serves(session, apart, "d-0")
