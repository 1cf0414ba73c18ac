"""Answers of models with several kinds of KV are the same where prefill and decode are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_disagg import answers, command, handovers, prompts, until_idle, until_known
from tests.support.tiny_models import FAMILIES, make_tiny_model

from commutator_scaffold.local_cluster import LocalCluster

LENGTHS = [20, 63, 64, 65, 130, 260, 545, 700]
"""Around windows of 64, chunks of 128, and the states of Qwen3-Next, which are 544 tokens apart."""
POLICIES = {
    "always": {"kind": "always", "timeout_s": 600},
    "conditional": {"kind": "conditional", "max_local_prefill_length": 100, "timeout_s": 600},
}


def deployment(folder: Path, policy: str) -> dict[str, Any]:
    each = {"kind": "reference", "kv_cache_bytes": 200 << 20, "max_tokens_per_step": 128}
    return {
        "models": [{"name": "m", "source": str(folder), "max_model_len": 4096}],
        "engines": [
            {**each, "name": "p", "role": "prefill"},
            {**each, "name": "d", "role": "decode"},
        ],
        "router": {"kind": "kv"},
        "disaggregation": POLICIES[policy],
        "frontend": {"request_timeout_s": 1200},
    }


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param(
            family,
            policy,
            marks=pytest.mark.slow
            if (family, policy) == ("gemma3", "always")
            else pytest.mark.long,
        )
        for family in FAMILIES
        for policy in POLICIES
    ],
)
async def test_answers_are_the_same(family: str, policy: str, tmp_path: Path) -> None:
    asked = prompts(LENGTHS)
    folder = make_tiny_model(family, tmp_path)
    with LocalCluster(deployment(folder, policy), start_timeout_s=300) as cluster:
        await until_known(cluster, 2)
        await command(cluster, "drain", "p-0")
        whole = await answers(cluster.url, asked, "whole")
        assert not any(answer.apart for answer in whole)
        await command(cluster, "undrain", "p-0")
        apart = await answers(cluster.url, asked, "apart")
        for one, other in zip(whole, apart, strict=True):
            assert one.text == other.text
        separate = [answer.apart for answer in apart if answer.apart["separate"]]
        assert {one["outcome"] for one in separate} == {"handed over"}
        assert len(separate) >= sum(length > 128 for length in LENGTHS)
        await until_idle(cluster)
        (counted,) = await handovers(cluster)
        assert counted.pulls.pulled_bytes > 0
        assert counted.pulls.failed == 0
