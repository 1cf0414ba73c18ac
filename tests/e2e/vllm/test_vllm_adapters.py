"""Adapters on real vLLM servers: loaded when needed, and the answers of the reference engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.support.launched_servers import wait_for_workers
from tests.support.lora_adapters import write_adapter

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [
    f"{beginning} Two fishermen mended nets, gulls circled the crane, and a ferry left for the "
    "islands with bread, letters and a piano. Nobody knew who had ordered it, but"
    for beginning in ("The harbour was quiet.", "It was a cold day in March.", "He told a story.")
]


@pytest.mark.parametrize("connection", ["http", "token_api"])
async def test_answers_are_those_of_the_reference_engine(connection: str, tmp_path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "vllm.yaml").read_text())
    (server,) = config["engines"]
    (model,) = config["models"]
    server |= {"replicas": 1, "connection": connection}
    server["args"] += ["--enable-lora", "--max-loras=2", "--max-lora-rank=16"]
    config["engines"].append({"kind": "reference", "kv_cache_bytes": "64MiB", "threads": 1})
    config["router"] = {"kind": "round_robin"}
    config["traffic"] = {
        "adapters": {
            name: {"model": model["name"], "source": str(write_adapter(tmp_path / name, seed))}
            for seed, name in enumerate(("sql", "poem"))
        }
    }
    with LocalCluster(config, start_timeout_s=600, joins=False) as cluster:
        wait_for_workers(cluster, 2)
        async with aiohttp.ClientSession(cluster.url) as session:
            said: dict[str, dict[str, str]] = {}

            async def ask(name: str, prompt: str) -> tuple[str, str, int]:
                body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
                async with session.post("/v1/completions", json=body) as answer:
                    found = await answer.json()
                    assert answer.status == 200, found
                    assert found["model"] == name
                    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                    worker = answer.headers["X-Commutator-Worker"]
                    return worker, found["choices"][0]["text"], cached

            for prompt in PROMPTS:
                for name in (model["name"], "sql", "poem"):
                    both = await asyncio.gather(ask(name, prompt), ask(name, prompt))
                    assert len({worker for worker, _, _ in both}) == 2
                    assert len({text for _, text, _ in both}) == 1, (name, both)
                    said.setdefault(prompt, {})[name] = both[0][1]
                    assert {cached for _, _, cached in both} == {0}, "no block of another adapter"
            names = [model["name"], "sql", "poem"]
            answers = {tuple(said[prompt][name] for prompt in PROMPTS) for name in names}
            assert len(answers) == len(names), "each adapter changes some answer"
