"""A whole deployment in child processes, for tests and the demo, on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from commutator.config.yaml_file import to_yaml
from commutator.trust import SECRET_FILE, RunSecret, adopt, secret_of_this_process


class LocalCluster:
    """Runs one configuration while its ``with`` block lasts.

    Inside the block this process belongs to the run, so that its clients can talk to the workers;
    not without ``joins``.

    ``config`` is a file, or the configuration itself as a mapping. ``log_path``
    holds everything that the processes print. Raises TimeoutError, with the end of the log, if the
    deployment does not become ready.
    """

    def __init__(
        self,
        config: Path | str | Mapping[str, Any],
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
        joins: bool = True,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="commutator-test-")
        folder = Path(self._folder.name)
        if isinstance(config, Mapping):
            path = folder / "cluster.yaml"
            path.write_text(to_yaml(dict(config)))
        else:
            path = Path(config)
        self.log_path = folder / "log.txt"
        self._url_path = folder / "url"
        self._argv = [
            sys.executable, "-m", "commutator", "serve", str(path), "--port", "0",
            "--url-file", str(self._url_path), *arguments,
        ]  # fmt: skip
        self.secret = secret_of_this_process() or RunSecret.new()
        """The run's, which is this process's own where it belongs to a run already."""
        secret_file = folder / "secret"
        self.secret.save(secret_file)
        self._env = {**os.environ, SECRET_FILE: str(secret_file), **(env or {})}
        self._membership = ExitStack()
        self._joins = joins
        self._start_timeout_s = start_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """Such as http://127.0.0.1:41000, without a slash at the end."""

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                self._argv, stdout=log, stderr=subprocess.STDOUT, env=self._env
            )
        try:
            self._wait_ready()
            if self._joins:
                self._membership.enter_context(adopt(self.secret))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._membership.close()
        self.stop()
        self._folder.cleanup()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and wait. Returns the exit code; kills what does not end in time."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def log(self) -> str:
        """What the processes have printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a process has printed ``text``.

        Raises TimeoutError with the end of the log.
        """
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{text!r} was not printed:\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def health(self) -> dict[str, Any]:
        """The front door's ``/health``."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            health: dict[str, Any] = json.load(answer)
        return health

    def worker_addresses(self) -> list[str]:
        """The addresses of our own engines, from the log; needs the log level info."""
        said = re.findall(r"\[(\S+)\] .*token API on (\S+)", self.log())
        return sorted(dict(said).values())

    def _wait_ready(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the cluster exited:\n{self.log()}")
            if self._url_path.exists():
                self.url = self._url_path.read_text().strip()
                return
            time.sleep(0.05)
        raise TimeoutError(f"not ready within {self._start_timeout_s:g} s:\n{self.log()[-4000:]}")
