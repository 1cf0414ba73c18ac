"""Clusters whose workers are servers of another make."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import psutil

from commutator_scaffold.local_cluster import LocalCluster

__all__ = ["kill_server_at", "kill_servers_of", "server_urls", "wait_for_workers"]


def wait_for_workers(cluster: LocalCluster, count: int, timeout_s: float = 600.0) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        with suppress(OSError):  # a busy machine answers late
            if sum(w["state"] == "ready" for w in cluster.health()["workers"]) == count:
                return
        time.sleep(0.2)
    raise AssertionError(f"not {count} workers:\n{cluster.log()[-4000:]}")


def server_urls(cluster: LocalCluster, program: str) -> dict[str, str]:
    """By worker, from the commands in the log; of a worker that was started again, the last."""
    command = rf"(\S+-\d+): .*{re.escape(program)} .*--host (\S+) --port (\d+)"
    found = re.findall(command, cluster.log())
    return {worker: f"http://{host}:{port}" for worker, host, port in found}


def kill_server_at(cluster: LocalCluster, url: str) -> None:
    """The one that was started with this port, and the processes of its group if it leads one."""
    port = url.rpartition(":")[2]
    (server,) = (
        process
        for process in _processes(cluster)
        if "--port" in (words := process.cmdline()) and words[words.index("--port") + 1] == port
    )
    if os.getpgid(server.pid) == server.pid:
        os.killpg(server.pid, signal.SIGKILL)
    else:  # a sidecar's child
        server.kill()


def kill_servers_of(cluster: LocalCluster, module: str) -> None:
    """Those that were started as this module, and their processes."""
    for process in _processes(cluster):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if module in process.cmdline() and os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)


def _processes(cluster: LocalCluster) -> list[psutil.Process]:
    assert cluster.process is not None
    return psutil.Process(cluster.process.pid).children(recursive=True)
