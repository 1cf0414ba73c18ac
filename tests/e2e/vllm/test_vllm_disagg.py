"""Prefill at one real vLLM server and decode at another, by vLLM's own NixlConnector."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.vllm.cluster import kill_server, metric, server_urls, wait_for_workers
from tests.support.vllm_server import CONFIG

from commutator.testing import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "smollm2-135m"
STORY = "Once upon a time, in a small village by the sea, there lived a fisherman. " * 8


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[LocalCluster]:
    if not Path(CONFIG.python).exists():
        pytest.skip(f"{CONFIG.python} is missing: install vLLM with `make vllm`")
    config = yaml.safe_load((root / "examples" / "vllm.yaml").read_text())
    (both,) = config["engines"]
    both["replicas"] = 1
    config["engines"] = [{**both, "name": role, "role": role} for role in ("prefill", "decode")]
    config["disaggregation"] = {
        "kind": "always",
        "timeout_s": 120,
        "router": {"kind": "least_loaded"},
    }
    with LocalCluster(config, start_timeout_s=600) as running:
        wait_for_workers(running, 2)
        yield running


def complete(url: str, prompt: str, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Commutator-Explain": "1"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]


def idle_blocks(cluster: LocalCluster) -> bool:
    urls = server_urls(cluster).values()
    return all(metric(url, "vllm:kv_cache_usage_perc") == 0 for url in urls)


def test_the_same_text_and_nothing_left_behind(cluster: LocalCluster) -> None:
    """The decode server itself computes next to nothing of the prompts."""
    urls = server_urls(cluster)
    prompts = [f"Story {number}. {STORY}" for number in range(6)]
    expected = [complete(urls["prefill-0"], prompt) for prompt in prompts]
    before = metric(urls["decode-0"], "vllm:external_prefix_cache_hits_total")
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda p: complete(cluster.url, p), prompts)) == expected
    moved = metric(urls["decode-0"], "vllm:external_prefix_cache_hits_total") - before
    print(f"tokens handed over: {moved:g}")
    assert moved >= 6 * 100
    until_s = time.monotonic() + 120
    while not idle_blocks(cluster):
        assert time.monotonic() < until_s, "blocks were leaked"
        time.sleep(0.5)


def test_without_the_prefill_server_it_is_answered_all_the_same(cluster: LocalCluster) -> None:
    prompt = f"Story 99. {STORY}"
    expected = complete(server_urls(cluster)["decode-0"], prompt)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, f"Another. {STORY}")
        kill_server(cluster, "prefill-0")
        assert len(answer.result(300)) > 10
    assert complete(cluster.url, prompt) == expected
