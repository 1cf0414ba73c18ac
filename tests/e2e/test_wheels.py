"""Wheels of every distribution, in a fresh environment outside the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_first_hour_with_wheels_only(root: Path) -> None:
    subprocess.run([sys.executable, root / "scripts" / "build_wheels.py"], check=True)
    done = subprocess.run(
        [sys.executable, root / "scripts" / "try_wheels.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planner: commutator serve, until an answer and a stop" in done.stdout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_without_each_distribution_the_rest_serves_and_the_missing_one_is_named(root: Path) -> None:
    subprocess.run([sys.executable, root / "scripts" / "build_wheels.py"], check=True)
    done = subprocess.run(
        [sys.executable, root / "scripts" / "try_wheels.py", "absences"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
