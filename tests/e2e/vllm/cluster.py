"""What tests ask of a cluster whose workers are vLLM servers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from tests.support import launched_servers
from tests.support.launched_servers import kill_server_at, wait_for_workers
from tests.support.vllm_server import ask_vllm

from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster
from commutator_vllm.client import TokenApiAddress, VllmClient, VllmTokenClient

__all__ = [
    "CONNECTION",
    "apart_config",
    "engine_client",
    "kill_server",
    "metric",
    "model_directory",
    "server_urls",
    "wait_for_workers",
]


CONNECTION = os.environ.get("COMMUTATOR_TEST_VLLM_CONNECTION", "http")
"""How front doors and tests reach the servers; `make test-vllm` runs the tests with both."""


def engine_client(cluster: LocalCluster, worker: str) -> VllmClient | VllmTokenClient:
    """A client, not yet started, as a front door of the cluster has one."""
    url = server_urls(cluster)[worker]
    (known,) = (one for one in cluster.health()["workers"] if one["worker_id"] == worker)
    if known["admin_address"] is None:
        return VllmClient(url, api_key=api_key_at(url))
    return VllmTokenClient(TokenApiAddress(url, known["admin_address"]))


def apart_config(root: Path) -> dict[str, Any]:
    """One server that prefills and one that decodes, so that they have enough on two cores.

    NIXL's progress thread in each server never rests. Where it takes the core that vLLM's worker
    gives up by ``sched_yield``, again and again, while it waits for work, Linux (6.18) lets the
    worker stand still for half a minute at a time. So here it sleeps a moment instead.
    """
    config: dict[str, Any] = yaml.safe_load((root / "examples" / "vllm.yaml").read_text())
    (server,) = config["engines"]
    server |= {"replicas": 1, "connection": CONNECTION}
    server["env"]["PYTHONPATH"] = str(Path(__file__).parent / "two_cores")
    config["engines"] = [{**server, "name": role, "role": role} for role in ("prefill", "decode")]
    config["runtime"] = {"lease_s": 60}  # a busy machine makes no worker a lost one
    return config


def server_urls(cluster: LocalCluster) -> dict[str, str]:
    """By worker, from the commands in the log; of a worker that was started again, the last."""
    return launched_servers.server_urls(cluster, "api_server")


def model_directory(cluster: LocalCluster) -> str:
    """What the servers were told to load."""
    found = re.search(r"api_server .*--model (\S+)", cluster.log())
    assert found is not None
    return found[1]


def metric(url: str, name: str) -> float:
    """One of the server's own metrics."""
    found = re.search(rf"^{name}\S* (\S+)", ask_vllm("GET", f"{url}/metrics"), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def kill_server(cluster: LocalCluster, worker: str) -> None:
    kill_server_at(cluster, server_urls(cluster)[worker])
