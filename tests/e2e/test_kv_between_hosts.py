"""KV blocks cross hosts by NIXL over their network: real ones, and answers stay the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.identity_prompts import PARAGRAPH, PROMPTS
from tests.support.hosts import why_not

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_demo import LEAST_TOKEN_BYTES, Demo, ask, drain, running, set_roles

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

TEXTS = [PROMPTS[0], PROMPTS[3], PARAGRAPH * 3, PARAGRAPH * 10]
"""From a few tokens to several hundred."""
BLOCK = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Demo]:
    with running("reference", "memory") as demo:
        demo.start()
        yield demo


@pytest.fixture(scope="module")
def expected(cluster: Demo) -> dict[str, str]:
    """The answers of workers that compute everything themselves."""
    return {text: ask(cluster.hosts[0], text, salt="alone")["text"] for text in TEXTS}


def test_blocks_that_workers_of_another_host_have(cluster: Demo, expected: dict[str, str]) -> None:
    h1, h2, h3 = cluster.hosts
    drain(cluster, h2)
    for text in TEXTS:
        assert ask(h1, text, salt="peers")["worker"].startswith("h3-")
    drain(cluster, h2, draining=False)
    drain(cluster, h3)
    for text in TEXTS:
        before = h2.received_bytes()
        answer = ask(h1, text, salt="peers")
        assert answer["worker"].startswith("h2-")
        assert answer["text"] == expected[text]
        cached = (answer["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert answer["cached"] == cached
        assert h2.received_bytes() - before > cached * LEAST_TOKEN_BYTES
    drain(cluster, h3, draining=False)


def test_prompts_are_computed_on_one_host_and_answered_on_another(
    cluster: Demo, expected: dict[str, str]
) -> None:
    h1, _, h3 = cluster.hosts
    set_roles(cluster, {"h2": "prefill", "h3": "decode"})
    for text in TEXTS:
        before = h3.received_bytes()
        answer = ask(h1, text, salt="apart")
        assert answer["text"] == expected[text]
        assert answer["worker"].startswith("h3-")
        assert answer["apart"]["outcome"] == "handed over", answer["apart"]
        assert answer["apart"]["prefill_worker_id"].startswith("h2-")
        blocks_bytes = (answer["prompt_tokens"] - 1) // BLOCK * BLOCK * LEAST_TOKEN_BYTES
        assert h3.received_bytes() - before > blocks_bytes
    set_roles(cluster, {"h2": "both", "h3": "both"})
