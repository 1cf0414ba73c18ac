"""What front doors, etcd and workers of `scripts/cluster_demo.py` know, asked from outside."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from attrs import frozen
from tests.support.guarded import program_of
from tests.support.hosts import Host
from tests.support.processes import command_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_demo import (
    COMMUTATOR,
    WORKERS,
    Demo,
    get,
    peers_of,
    ready_workers,
    running,
    workers_of,
)

__all__ = [
    "COMMUTATOR",
    "WORKERS",
    "Demo",
    "WorkerCount",
    "age_s",
    "engines_of",
    "etcdctl",
    "get",
    "indexed_blocks",
    "leader_of_etcd",
    "own_count",
    "peers_of",
    "ready_workers",
    "registered",
    "running",
    "seen_by",
    "stored_blocks",
    "whole_again",
    "workers_of",
]

_ENGINES = ("commutator_sim", "commutator_reference")
_TIERS = {"dram": "host", "nvme": "disk"}
_INDEXED = re.compile(
    r'^commutator_router_indexed_blocks\{tier="(\w+)",worker="([^"]+)"\} (\S+)$', re.MULTILINE
)


def whole_again(demo: Demo) -> None:
    """Wait until both front doors know all workers as ready, and each other."""
    doors = demo.hosts[:2]
    demo.until(
        "the workers", lambda: all(ready_workers(door) == WORKERS for door in doors), timeout_s=60.0
    )
    demo.until("front doors to share", lambda: all(peers_of(d) == 1 for d in doors), timeout_s=60.0)


def age_s(door: Host) -> float:
    """How old a front door's view of the registry may be."""
    health = get(f"http://{door.address}:8000/health") or {}
    return float(health.get("registry_age_s") or 0.0)


def engines_of(host: Host) -> set[int]:
    """The processes of the engines that run on a host."""
    return {pid for pid in host.pids() if any(name in command_of(pid) for name in _ENGINES)}


def seen_by(door: Host) -> dict[str, int]:
    """The process of each worker that a front door knows."""
    return {name: int(worker["pid"]) for name, worker in workers_of(door).items()}


def etcdctl(demo: Demo, *argv: str) -> str:
    """Run etcdctl as a host of the cluster. Raises CalledProcessError."""
    urls = ",".join(f"https://{host.address}:2379" for host in demo.etcd_hosts)
    files = ("--cacert", "certs/ca.pem", "--cert", "certs/h1.pem", "--key", "certs/h1.key")
    done = subprocess.run(
        [program_of("etcdctl"), *files, "--endpoints", urls, "--command-timeout", "2s", *argv],
        cwd=demo.folder, env={**os.environ, "ETCDCTL_API": "3"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


def registered(demo: Demo) -> dict[str, int]:
    """The process of each worker that etcd has. Raises CalledProcessError without a quorum."""
    prefix = "/commutator/demo/v1/workers/"
    found: dict[str, Any] = json.loads(etcdctl(demo, "get", "--prefix", prefix, "-w", "json"))
    workers = {}
    for entry in found.get("kvs", ()):
        name = base64.b64decode(entry["key"]).decode().removeprefix(prefix)
        sealed = base64.b64decode(entry["value"]).decode()
        record = json.loads(sealed[sealed.index("{") :])
        if name != "hub":  # which host others share their loads at
            workers[name] = int(record["info"]["pid"])
    return workers


def leader_of_etcd(demo: Demo) -> Host:
    """The host of the member that leads. Raises LookupError if none does."""
    for host in demo.etcd_hosts:
        with urllib.request.urlopen(f"http://{host.address}:2381/metrics", timeout=5) as page:
            if b"\netcd_server_is_leader 1\n" in page.read():
                return host
    raise LookupError("no member of etcd leads")


def indexed_blocks(door: Host) -> dict[tuple[str, str], int]:
    """Blocks in a front door's prefix index, by worker and tier; without those that have none."""
    with urllib.request.urlopen(f"http://{door.address}:8000/metrics", timeout=5) as page:
        text = page.read().decode()
    found = {(worker, tier): int(float(n)) for tier, worker, n in _INDEXED.findall(text)}
    return {place: blocks for place, blocks in found.items() if blocks}


@frozen
class WorkerCount:
    """What a worker counts itself."""

    requests: int
    held_blocks: int
    cached_blocks: int


def own_count(door: Host, worker: str) -> WorkerCount:
    """Ask a worker through the socket of a front door. Raises OSError."""
    load = _ask_socket(door, f"/admin/workers/{worker}/load")
    return WorkerCount(
        load["running"] + load["waiting"], load["kv_used_blocks"], load["kv_cached_blocks"]
    )


def stored_blocks(door: Host) -> dict[tuple[str, str], int]:
    """Blocks in the tiers of each worker, as it counts them; by worker and tier as in an index.

    Empty for workers without tiers. Raises OSError.
    """
    answers = _ask_socket(door, "/admin/tiers")["answers"]
    return {
        (worker, _TIERS[row["tier"]]): row["blocks"]
        for worker, rows in answers.items()
        for row in rows
        if row["tier"] in _TIERS and row["blocks"]
    }


def _ask_socket(door: Host, path: str) -> Any:
    """The JSON that a front door answers whoever may use its socket."""
    health: Mapping[str, Any] = get(f"http://{door.address}:8000/health") or {}
    asking = _UnixConnection(health.get("socket", ""))
    with closing(asking):
        asking.request("GET", path)
        answer = json.load(asking.getresponse())
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("door", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
