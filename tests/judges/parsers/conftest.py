"""The suite and the templates that `scripts/install_judges.py` installs, here if need be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def judges(root: Path) -> Iterator[Path]:
    """The folder with the installed suite, which can be imported, and `templates`."""
    subprocess.run([sys.executable, str(root / "scripts" / "install_judges.py")], check=True)
    folder = root / "build" / "judges"
    sys.path.insert(0, str(folder / "suite"))
    yield folder
    sys.path.remove(str(folder / "suite"))
