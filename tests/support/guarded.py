"""Servers of tests, which end with the test process however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which

from commutator.launcher import guard

__all__ = ["ServerGuard", "end_at_once", "program_of"]


def program_of(name: str) -> str:
    """The program beside this Python, from `requirements-dev.txt`, or else on the PATH."""
    found = which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is missing: pip install -r requirements-dev.txt"
    return found


def end_at_once(process: subprocess.Popen[bytes] | None) -> None:
    """End a server as a power cut would; None has ended already."""
    if process is not None:
        process.kill()
        process.wait()


class ServerGuard:
    """Ends the servers that it started, and removes ``folder``, if this process dies before."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"COMMUTATOR_RUN={uuid.uuid4().hex}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self._mark, str(folder)],
            stdin=subprocess.PIPE,
        )

    def start(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a server in a session of its own; what it prints is appended to ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                argv,
                stdout=output,
                stderr=output,
                env={**os.environ, **dict([self._mark.split("=")]), **(env or {})},
                start_new_session=True,
            )

    def close(self) -> None:
        """Watch no longer. Its servers must have ended."""
        # Its pipe must not end first: it would remove the folder.
        self._process.kill()
        self._process.communicate()
