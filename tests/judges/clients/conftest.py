"""The programs that `scripts/install_clients.py` installs, and the table of what they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen
from tests.judges.clients.table import Table

TIME_LIMIT_S = 240

Run = Callable[..., str]


@frozen
class Program:
    """One installed environment."""

    folder: Path
    versions: dict[str, str]

    def path(self, name: str) -> str:
        """Of one of its programs, whether of npm or PyPI."""
        places = (self.folder / "bin" / name, self.folder / "node_modules" / ".bin" / name)
        return str(next(place for place in places if place.exists()))


@pytest.fixture(scope="session")
def installed(root: Path) -> Callable[[str], Program]:
    """Gives the environment of a name, which it installs if need be."""

    def install(name: str) -> Program:
        subprocess.run([sys.executable, root / "scripts" / "install_clients.py", name], check=True)
        folder = root / "build" / "clients" / name
        return Program(folder, json.loads((folder / "installed.json").read_text()))

    return install


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a folder, with an empty home: no settings of whoever runs the tests.

    Returns what it prints; fails where its exit code is not 0.
    """

    def start(command: list[str], folder: Path = tmp_path, **environment: str) -> str:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        ran = subprocess.run(
            command,
            cwd=folder,
            env={**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-8000:]
        return ran.stdout

    return start


@pytest.fixture(scope="session")
def table(root: Path, request: pytest.FixtureRequest) -> Iterator[Table]:
    """Written if all that ran has passed."""
    made = Table()
    yield made
    if made.rows and not request.session.testsfailed:
        made.write(root / "docs" / "reference" / "clients.json")
