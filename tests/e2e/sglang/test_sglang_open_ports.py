"""What another host reaches of SGLang servers: with tiers, and with prefill and decode apart."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.launched_servers import wait_for_workers
from tests.support.open_ports import listeners, of_others, outside_host
from tests.support.sglang_server import need_sglang

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.security]


def ask(url: str) -> None:
    """One request, so that everything that opens its sockets late has opened them."""
    body = {"model": "smollm2-135m", "prompt": "word " * 300, "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("apart", [True, False], ids=["prefill apart", "tiers"])
def test_another_host_finds_the_front_door_and_nothing_of_sglang(
    root: Path, tmp_path: Path, *, apart: bool
) -> None:
    """So it cannot attack UCX there either, which moves what is handed over and stored."""
    need_sglang()
    config: dict[str, Any] = yaml.safe_load((root / "examples" / "sglang.yaml").read_text())
    server = config["engines"][0] | {"replicas": 1}
    config["runtime"] = {"lease_s": 60}  # a busy machine makes no worker a lost one
    if apart:
        config["engines"] = [
            {**server, "name": role, "role": role} for role in ("prefill", "decode")
        ]
        config["disaggregation"] = {"kind": "always", "timeout_s": 120}
    else:
        config["engines"] = [server]
        config["tiers"] = [
            {"kind": "dram", "capacity": "100MB", "huge_pages": "off"},
            {"kind": "nvme", "path": str(tmp_path / "{worker}"), "capacity": "100MB"},
        ]
    with outside_host() as outside:
        before = outside.reachable_ports()
        anywhere = ("--set", "frontend.host=0.0.0.0")
        with LocalCluster(config, arguments=anywhere, start_timeout_s=600) as running:
            wait_for_workers(running, len(config["engines"]))
            ask(running.url)
            door = int(running.url.rpartition(":")[2])
            open_ports = listeners(running)
            print(f"open: {sorted(set(open_ports))}")
            assert len(open_ports) > 5
            assert {port for _, port in of_others(open_ports)} == {door}
            assert outside.reachable_ports() - before == {door}
