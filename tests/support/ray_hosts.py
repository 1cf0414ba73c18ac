"""A real Ray cluster, a node on each host: the first is its head."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.support.hosts import Host

__all__ = ["RayHosts"]

_RAY = Path(sys.executable).with_name("ray")
_PORT, _JOBS_PORT = 6399, 8265
_PASSPHRASE = "a passphrase that every host has"
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""A node is taken for dead after 9 s without an answer."""
_CPUS = 2
_STARTED = "will now block forever"
"""What `ray start --block` prints at last."""


class RayHosts:
    """Starts Ray on hosts, and waits until every node has started."""

    def __init__(
        self,
        places: Sequence[Host],
        *,
        jobs: bool = False,
        start_timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``jobs``: with a server for `ray job submit`, which needs `ray[default]`.

        ``env`` is added to that of everything.
        """
        self.hosts = places
        self._jobs = jobs
        self._env = {} if env is None else dict(env)
        self._folder = tempfile.TemporaryDirectory(prefix="r-")  # sockets have short names
        self.folder = Path(self._folder.name)
        self.address = f"{places[0].address}:{_PORT}"
        self.jobs_at = f"http://{places[0].address}:{_JOBS_PORT}"
        """For `ray job submit --address`."""
        self._start_timeout_s = start_timeout_s
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """Of everything that runs on the hosts."""
        return {
            **os.environ,
            **_HEALTH,
            "PATH": f"{_RAY.parent}:{os.environ['PATH']}",
            "CLUSTER_SECRET": _PASSPHRASE,
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
            "RAY_JOB_START_TIMEOUT_SECONDS": "600",
            **self._env,
        }

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self.start(host)
                self.until_started(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            self.end(host)
        self._folder.cleanup()

    def start(self, host: Host) -> None:
        """Start the node of a host; returns at once."""
        head = host is self.hosts[0]
        role = ["--head", f"--port={_PORT}", f"--include-dashboard={str(self._jobs).lower()}"]
        role += [f"--dashboard-host={host.address}", f"--dashboard-port={_JOBS_PORT}"]
        if not head:
            role = [f"--address={self.address}"]
        argv = host.command(
            _RAY, "start", *role, "--block", f"--node-ip-address={host.address}",
            f"--num-cpus={_CPUS}", "--object-store-memory=80000000", "--disable-usage-stats",
            f"--temp-dir={self.folder / host.name}",
        )  # fmt: skip
        with (self.folder / f"{host.name}.log").open("wb") as log:
            self._nodes[host.name] = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log)

    def start_again(self) -> None:
        """End what is left of Ray on all hosts, as `ray stop` does, and start it again."""
        for host in self.hosts:
            node = self._nodes.pop(host.name)
            node.send_signal(signal.SIGTERM)
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        for host in self.hosts:
            self.start(host)
            self.until_started(host)

    def end(self, host: Host) -> None:
        """End whatever runs on a host, at once."""
        deadline_s = time.monotonic() + 30
        while pids := host.pids():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes {pids} on {host.name} do not end")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(0.05)
        if (node := self._nodes.pop(host.name, None)) is not None:
            node.wait()

    def until_started(self, host: Host) -> None:
        """Wait for a node; one that gave up, as Ray does after 30 s, is started again."""
        deadline_s = time.monotonic() + self._start_timeout_s
        while _STARTED not in (said := (self.folder / f"{host.name}.log").read_text()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray did not start on {host.name}:\n{said[-3000:]}")
            if self._nodes[host.name].poll() is not None:
                self.end(host)
                self.start(host)
            time.sleep(0.2)
