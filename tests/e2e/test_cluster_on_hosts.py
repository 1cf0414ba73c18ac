"""A cluster on three hosts: the demonstration, and a registry that one host serves to others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.hosts import why_not

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


@pytest.mark.parametrize("registry", ["etcd", "memory"])
def test_the_demonstration(registry: str) -> None:
    """It fails itself where a step does not show what it says."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "cluster_demo.py", "sim", registry],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# done" in done.stdout
    assert "h3-w-0 gets no new requests" in done.stdout
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    (number,) = set(re.findall(r"http://10\.(\d+)\.0\.1:8000", done.stdout))
    assert f"cmh{number}-" not in left.stdout
