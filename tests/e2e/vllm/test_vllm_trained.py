"""What models of eight families say is the same by our token path and by vLLM's own server.

Trained models answer greedily; vLLM's server has its own parsers of tools and reasoning on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from attrs import frozen
from tests.e2e.vllm.cluster import server_urls, wait_for_workers
from tests.judges.trained.clients import Answer, ask_chat
from tests.support.trained_models import trained_model
from tests.support.trained_scripts import FAMILIES, Turn, turns
from tests.support.vllm_server import need_vllm

from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PARSERS: Mapping[str, tuple[str, str | None]] = {
    "hermes": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "llama3_json": ("llama3_json", None),
    "deepseek_v3_2": ("deepseek_v32", "deepseek_v3"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "glm": ("glm45", "glm45"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "gemma4": ("gemma4", "gemma4"),
}
"""vLLM's own, of tools and reasoning."""


@pytest.fixture(scope="module", params=PARSERS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def cluster(name: str, root: Path) -> Iterator[LocalCluster]:
    need_vllm()
    config = yaml.safe_load((root / "examples" / "vllm.yaml").read_text())
    source = str(trained_model(FAMILIES[name]))
    config["models"] = [{"name": "m", "source": source, "max_model_len": 2048}]
    (engine,) = config["engines"]
    tools, reasoning = PARSERS[name]
    own = [one for one in engine["args"] if not one.startswith("--tool-call-parser")]
    own.append(f"--tool-call-parser={tools}")
    if reasoning is not None:
        own.append(f"--reasoning-parser={reasoning}")
    engine |= {"replicas": 1, "connection": "token_api", "args": own}
    patient = ("--set", "runtime.lease_s=60")
    with LocalCluster(config, arguments=patient, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


def test_same(name, cluster):
    (url,) = server_urls(cluster).values()
    out = []
    for turn in turns(FAMILIES[name]):
        for streamed in (False, True):
            try:
                ours = ask_chat(cluster.url, "m", turn, streamed=streamed)
            except Exception as e:
                ours = repr(e)[:300]
            try:
                theirs = ask_chat(
                    url, "m", turn, streamed=streamed, strict=False, api_key=api_key_at(url) or "-"
                )
            except Exception as e:
                theirs = repr(e)[:300]
            for f in ("said", "ended", "usage"):
                a, b = getattr(ours, f, ours), getattr(theirs, f, theirs)
                if a != b:
                    out.append((name, turn.name, streamed, f, a, b))
            if getattr(ours, "said", None) != turn.said:
                out.append(
                    (name, turn.name, streamed, "SCRIPT", getattr(ours, "said", ours), turn.said)
                )
    print("\n".join(map(str, out)))
    Path(f"/tmp/trained/vllm-{name}.txt").write_text("\n".join(map(str, out)))
    assert not out
