"""What tests ask of a cluster whose workers are vLLM servers."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import psutil
from tests.support.vllm_server import ask_vllm

from commutator.testing import LocalCluster

__all__ = ["kill_server", "metric", "model_directory", "server_urls", "wait_for_workers"]


def wait_for_workers(cluster: LocalCluster, count: int) -> None:
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s:
        with suppress(OSError):  # a busy machine answers late
            if sum(w["state"] == "ready" for w in cluster.health()["workers"]) == count:
                return
        time.sleep(0.2)
    raise AssertionError(f"not {count} workers:\n{cluster.log()[-4000:]}")


def server_urls(cluster: LocalCluster) -> dict[str, str]:
    """By worker, from the commands in the log; of a worker that was started again, the last."""
    commands = re.findall(r"(\S+-\d+): .*api_server --host (\S+) --port (\d+)", cluster.log())
    return {worker: f"http://{host}:{port}" for worker, host, port in commands}


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
    port = server_urls(cluster)[worker].rpartition(":")[2]
    assert cluster.process is not None
    (server,) = (
        process
        for process in psutil.Process(cluster.process.pid).children(recursive=True)
        if "--port" in (words := process.cmdline()) and words[words.index("--port") + 1] == port
    )
    os.killpg(server.pid, signal.SIGKILL)
