"""``scripts/gpu_check.py`` on a CPU: every check runs, and what is missing is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def checked(
    root: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "gpu_check.py"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )


def results(table: str) -> dict[str, str]:
    """What each line says, "ok" or "FAILED"."""
    rows = [line.split("  ") for line in table.splitlines() if "  " in line]
    return {
        cells[0]: next(each.strip() for each in cells[1:] if each.strip())
        for cells in rows
        if cells[0] != "check"
    }


@pytest.mark.long
@pytest.mark.slow
def test_every_check_passes_on_a_cpu(root: Path) -> None:
    done = checked(root, "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(done.stdout)
    assert set(found.values()) == {"ok"}, done.stdout
    assert "not run" not in done.stdout
    for what in (
        "engine: equal greedy tokens",
        "nixl: device to host",
        "nixl: host to device",
        "tiers: dram: a damaged block",
        "tiers: nvme: load, checksums",
        "handover: two processes, equal tokens",
    ):
        assert what in found


@pytest.mark.slow
def test_no_gpu_is_one_clear_error(root: Path) -> None:
    done = checked(root, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: PyTorch ")
    assert line.endswith("or use --device cpu")


@pytest.mark.slow
def test_what_is_not_installed_is_said_and_the_rest_is_checked(root: Path, tmp_path: Path) -> None:
    """NIXL and transformers are hidden by modules that cannot be imported."""
    for name in ("nixl", "nixl_meta_utils", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    options = ("--device", "cpu", "--small")
    done = checked(root, *options, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    lacks = [line for line in done.stdout.splitlines() if line.startswith("not run: ")]
    assert {line.split(": ")[1] for line in lacks} == {"engine", "nixl", "tiers", "handover"}
    assert all("To do: " in line for line in lacks)
