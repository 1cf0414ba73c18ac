"""What `commutator cluster ls` prints, given what the registry has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.front_door import engine_info

from commutator.cli.main import main
from commutator.contract.worker import Role, WorkerRecord
from commutator_rollout import cluster

RECORD = WorkerRecord(
    worker_id="h1-sim-0",
    model="m",
    engine="sim",
    kind="sim",
    address="10.0.0.1:4100",
    info=engine_info(),
    host="h1",
    generation="ab12",
    role=Role.DECODE,
    draining=True,
    labels={"zone": "a"},
)


def test_it_lists_workers_for_people_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_ask", lambda *_: [RECORD])
    file = tmp_path / "cluster.yaml"
    file.write_text("models: []")
    shown = CliRunner().invoke(main, ["cluster", "ls", str(file)])
    assert "decode, draining" in shown.output
    told = CliRunner().invoke(main, ["cluster", "ls", str(file), "--json"])
    assert json.loads(told.output) == [
        {
            "worker_id": "h1-sim-0",
            "host": "h1",
            "address": "10.0.0.1:4100",
            "model": "m",
            "role": "decode",
            "state": "draining",
            "generation": "ab12",
            "labels": {"zone": "a"},
        }
    ]
