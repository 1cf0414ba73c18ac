"""Only one build of NIXL can be in a process: ours is the one that others in it get."""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = "from commutator_engine_kit.nixl.library import load_nixl, make_agent; ours = load_nixl()"
THEIRS = "import nixl._api as theirs"
SAME = "assert ours is theirs; make_agent('one')"


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "ours last"])
def test_all_users_in_a_process_have_one_build(order: tuple[str, str]) -> None:
    program = "; ".join((*order, SAME))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
