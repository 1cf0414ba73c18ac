"""The suite and the templates that `scripts/install_judges.py` installs, here if need be."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ["installed_judges"]

ROOT = Path(__file__).resolve().parents[2]


@cache
def installed_judges() -> Path:
    """The folder with the installed suite, which can be imported from now on, and `templates`."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "install_judges.py")], check=True)
    folder = ROOT / "build" / "judges"
    sys.path.append(str(folder / "suite"))
    return folder
