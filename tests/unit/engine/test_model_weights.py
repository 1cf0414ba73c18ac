"""The script that an engine's own Python runs to make weights that the engine can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import commutator_engine_kit

SCRIPT = Path(commutator_engine_kit.__path__[0]) / "convert_gguf.py"


def test_modules_beside_the_script_do_not_stand_for_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import http.client, sys; sys.exit(http.__file__)")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "a.gguf", str(tmp_path)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert Path(done.stderr.strip()).parts[-2:] == ("http", "__init__.py")
    assert Path(done.stderr.strip()).parent.parent != SCRIPT.parent
