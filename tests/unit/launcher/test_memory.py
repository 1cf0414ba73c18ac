"""The memory of our own processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, re
from pathlib import Path
from commutator.launcher.child import use_huge_pages

lasting = [{number: str(number)} for number in range(100_000)]
moved = use_huge_pages()
rollup = Path("/proc/self/smaps_rollup")
text = rollup.read_text() if rollup.exists() else ""
found = re.search(r"AnonHugePages: +([0-9]+) kB", text)
assert lasting == [{number: str(number)} for number in range(100_000)]
print(json.dumps([moved, use_huge_pages(), int(found[1]) << 10 if found else 0]))
"""


def test_lasting_objects_move_to_huge_pages_and_stay_what_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    moved, again, in_huge_pages = json.loads(done.stdout)
    if not moved:
        pytest.skip("this system moves nothing to huge pages")
    assert moved >= 8 << 20
    assert again >= moved  # what is moved already counts
    assert in_huge_pages >= moved
