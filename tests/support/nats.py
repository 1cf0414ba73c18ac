"""A real NATS server for tests, on a free port; it may be paused, killed and started again."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from tests.support.guarded import ServerGuard, end_at_once, program_of

from commutator.launcher.ports import PortPicker

__all__ = ["NatsServer", "fresh_subjects", "nats"]

_HOST = "127.0.0.1"
_numbers = itertools.count()


def fresh_subjects() -> str:
    """A name of a cluster that no other test uses."""
    return f"test-{next(_numbers)}"


class NatsServer:
    """One server with the options in ``config``. Inside its block it runs and answers."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self.port = PortPicker().pick(_HOST)
        self.url = f"nats://{_HOST}:{self.port}"
        self._folder = folder
        self._config = f"host: {_HOST}\nport: {self.port}\n{config}\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: ServerGuard | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        self._guard = ServerGuard(self._folder)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._guard is not None
        self._guard.close()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the server unless it runs, and wait until it accepts connections."""
        if self._process is not None:
            return
        file, log = self._folder / "nats.conf", self._folder / "nats.log"
        file.write_text(self._config)
        assert self._guard is not None
        self._process = self._guard.start([program_of("nats-server"), "-c", str(file)], log)
        deadline_s = time.monotonic() + timeout_s
        while not self._accepts():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(log.read_text()[-4000:])
            time.sleep(0.02)

    def kill(self) -> None:
        """End the server as a power cut would."""
        process, self._process = self._process, None
        end_at_once(process)

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
