"""What a scenario needs besides this project, and what to do when it is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["NotInstalledError", "needs", "needs_command"]


class NotInstalledError(RuntimeError):
    """A scenario cannot run on this machine; says what is missing, and how to install it."""


def needs(path: Path, install: str) -> Path:
    """``path``; raises NotInstalledError unless it is there."""
    if not path.exists():
        raise NotInstalledError(f"{path} is missing: install it with `{install}`")
    return path


def needs_command(name: str, install: str) -> str:
    """Where ``name`` lies; raises NotInstalledError when it is not on the PATH."""
    path = shutil.which(name)
    if path is None:
        raise NotInstalledError(f"`{name}` is missing: install it with `{install}`")
    return path
