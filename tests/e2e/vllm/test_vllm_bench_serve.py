"""vLLM's own client, `vllm bench serve`, runs to its end against our front door."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.vllm_client import DATA, bench_serve
from tests.e2e.vllm.cluster import metric, model_directory, server_urls
from tests.support.vllm_server import CONFIG

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROMPTS = 40


def hits(pair: LocalCluster) -> float:
    """Tokens, counted by both servers themselves."""
    urls = server_urls(pair).values()
    return sum(metric(url, "vllm:prefix_cache_hits_total") for url in urls)


@pytest.mark.parametrize("data", DATA)
def test_nothing_fails(pair: LocalCluster, data: str) -> None:
    before = hits(pair)
    run = bench_serve(
        Path(CONFIG.python), pair.url, "smollm2-135m", model_directory(pair), data, prompts=PROMPTS
    )
    print(f"{data}: {run}; cached tokens: {hits(pair) - before:g}")
    assert (run.completed, run.failed) == (PROMPTS, 0)
    assert run.output_tokens > 0
    if data == "prefix_repetition":
        # Four beginnings of 128 tokens: each is computed at most once at either server.
        assert hits(pair) - before >= (PROMPTS - 2 * 4) * 96
