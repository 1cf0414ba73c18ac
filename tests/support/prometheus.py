"""A real Prometheus for tests, and its `promtool`; `make peers` installs both."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen

from commutator.launcher.ports import PortPicker

__all__ = ["Prometheus", "program", "running_prometheus"]

_ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where it is missing."""
    ours = _ROOT / ".venv-prometheus" / "usr" / "bin" / name
    found = str(ours) if ours.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: `make peers` installs it from Debian's packages")
    return found


@frozen
class Prometheus:
    url: str

    def get(self, path: str, **query: str) -> Any:
        """What its HTTP API answers to ``path``, such as "query". Raises OSError without it."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[Any]:
        """The series of the expression now; fails the test if Prometheus refuses it."""
        try:
            found: list[Any] = self.get("query", query=expr)["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        return found

    def course(self, expr: str, start_s: float, end_s: float) -> list[Any]:
        """The series of the expression, a value each second, between two Unix times."""
        period = {"start": str(start_s), "end": str(end_s), "step": "1"}
        found: list[Any] = self.get("query_range", query=expr, **period)["result"]
        return found


@contextmanager
def running_prometheus(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Runs it with ``config``; what it stores and prints goes to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = PortPicker().pick(_HOST)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={_HOST}:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Prometheus(f"http://{_HOST}:{port}")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            with suppress(OSError):
                server.get("targets")
                break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)
