"""A real SGLang server is killed while prefill and decode are apart behind the front door.

Whichever it is: every client gets its whole answer, the servers that live rest, and the killed one
comes back and serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from attrs import frozen
from tests.support.launched_servers import kill_server_at, server_urls, wait_for_workers
from tests.support.sglang_server import need_sglang

from commutator.errors import CommutatorError
from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster
from commutator_sglang.client import SglangClient

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(4800)]

MODEL = "smollm2-135m"
PROGRAM = "sglang.launch_server"
SERVERS = {"p-0", "p-1", "d-0"}
WAIT_S = 1200.0
ANIMALS = ("cat", "horse", "crow", "whale")
SENTENCE = "lived by the sea, counted the boats in the harbour and waited for the tide. "


@frozen
class Answer:
    text: str
    decision: dict[str, Any]
    """What the front door says of it."""

    @property
    def moved(self) -> bool:
        """Whether a server was lost on the way."""
        failed = self.decision["disaggregation"]["failed"]
        return bool(failed or self.decision.get("migrations"))


@pytest.fixture(scope="module")
def apart(root: Path) -> Iterator[LocalCluster]:
    """Two servers for prefill, in small steps so that they hear of aborts, and one for decode."""
    need_sglang()
    config = yaml.safe_load((root / "examples" / "sglang.yaml").read_text())
    (both,) = config["engines"]
    both["start_timeout_s"] = WAIT_S
    small = {**both, "args": [*both["args"], "--chunked-prefill-size=16"]}
    config["engines"] = [
        {**small, "name": "p", "role": "prefill", "replicas": 2},
        {**both, "name": "d", "role": "decode", "replicas": 1},
    ]
    config["disaggregation"] = {
        "kind": "always",
        "on_failure": "another_worker",
        "timeout_s": WAIT_S,
        "router": {"kind": "least_loaded"},
    }
    config["migration"] = {"wait_s": WAIT_S}
    config["frontend"] = {"request_timeout_s": 2 * WAIT_S}
    config["runtime"] = {"lease_s": 300}  # a busy machine makes no worker a lost one
    with LocalCluster(config, start_timeout_s=WAIT_S) as running:
        wait_for_workers(running, len(SERVERS))
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=2 * WAIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as made:
        yield made


def prompts() -> list[str]:
    """Each some 110 tokens, and no page of them in common."""
    return [f"A {animal} of {n} years {SENTENCE * 6}" for n, animal in enumerate(ANIMALS, 2)]


@asynccontextmanager
async def server(cluster: LocalCluster, worker: str) -> AsyncIterator[SglangClient]:
    url = server_urls(cluster, PROGRAM)[worker]
    client = SglangClient(url, api_key=api_key_at(url), answer_timeout_s=60)
    try:
        yield client
    finally:
        await client.close()


async def says(cluster: LocalCluster, worker: str, *, busy: bool) -> bool:
    """Whether that is the server's own account of itself."""
    async with server(cluster, worker) as client:
        with suppress(CommutatorError):
            load = await client.load()
            return bool(load.running or load.waiting or load.kv_used_blocks) == busy
    return False


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await what():
            await asyncio.sleep(0.02)


async def complete(
    session: aiohttp.ClientSession, cluster: LocalCluster, prompt: str, salt: str
) -> Answer:
    """Under a salt of its own nothing of the prompt is cached."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    headers = {"X-Commutator-Explain": "1"}
    url = f"{cluster.url}/v1/completions"
    async with session.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["X-Commutator-Decision"])
    assert answer["usage"]["completion_tokens"] == 6
    assert decision["disaggregation"]["outcome"] == "handed over", decision
    return Answer(answer["choices"][0]["text"], decision)


async def all_of(session: aiohttp.ClientSession, cluster: LocalCluster, salt: str) -> list[Answer]:
    asked = (complete(session, cluster, prompt, salt) for prompt in prompts())
    return await asyncio.gather(*asked)


async def undisturbed(cluster: LocalCluster) -> None:
    """All servers are there, and none has anything to do."""
    await asyncio.to_thread(wait_for_workers, cluster, len(SERVERS))

    async def idle() -> bool:
        return all([await says(cluster, worker, busy=False) for worker in SERVERS])

    await until(idle)


async def killed_under_way(
    session: aiohttp.ClientSession, cluster: LocalCluster, victim: str
) -> list[Answer]:
    """The answers that were at the victim, each as it is without any trouble."""
    expected = [answer.text for answer in await all_of(session, cluster, "quiet")]
    for attempt in range(5):
        await undisturbed(cluster)
        asking = asyncio.create_task(all_of(session, cluster, f"{victim} {attempt}"))
        for worker in (victim, "p-0", "d-0"):
            await until(partial(says, cluster, worker, busy=True))
        await asyncio.to_thread(kill_server_at, cluster, server_urls(cluster, PROGRAM)[victim])
        answers = await asking
        assert [answer.text for answer in answers] == expected
        if moved := [answer for answer in answers if answer.moved]:
            return moved
    raise AssertionError("all answers were at their end before the kill")


async def ended(cluster: LocalCluster, worker: str, legs: int) -> None:
    """Wait until the log says of that many legs how long the server ran on after their abort.

    Of one at least it must tell that it ended, not that it had not by the end of a patient wait.
    """
    url = server_urls(cluster, PROGRAM)[worker]
    told = re.compile(rf"{re.escape(url)}: disaggregated request \S+ (.* ms) after its abort")

    async def all_told() -> bool:
        return len(told.findall(cluster.log())) >= legs

    await until(all_told)
    how = told.findall(cluster.log())
    print(f"legs aborted at {worker}: {how}")
    assert any(one.startswith("ended") for one in how)


@pytest.mark.proves("sglang", "prefill and decode apart: one side killed", how="real engine on CPU")
async def test_a_prefill_server_is_killed(
    session: aiohttp.ClientSession, apart: LocalCluster
) -> None:
    """What it had goes to the other one."""
    moved = await killed_under_way(session, apart, "p-0")
    for answer in moved:
        told = answer.decision["disaggregation"]
        assert [failed["prefill_worker"] for failed in told["failed"]] == ["p-0"]
        assert told["prefill_worker_id"] == "p-1"
    await undisturbed(apart)
    await ended(apart, "d-0", len(moved))
    await serves(session, apart, "p-0")


async def test_the_decode_server_is_killed(
    session: aiohttp.ClientSession, apart: LocalCluster
) -> None:
    """Its requests wait until it is back; those for prefill do not go on meanwhile."""
    moved = await killed_under_way(session, apart, "d-0")
    for answer in moved:
        assert {move["from_worker"] for move in answer.decision["migrations"]} == {"d-0"}
    await undisturbed(apart)
    await ended(apart, "p-0", 1)


async def serves(session: aiohttp.ClientSession, cluster: LocalCluster, worker: str) -> None:
    """Requests are handed over from it again."""

    async def again() -> bool:
        answers = await all_of(session, cluster, os.urandom(8).hex())
        return worker in {a.decision["disaggregation"]["prefill_worker_id"] for a in answers}

    await until(again)
