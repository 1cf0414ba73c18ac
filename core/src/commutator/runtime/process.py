"""One child process with its whole process group: output by the line, and a certain end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from commutator.runtime import guard
from commutator.runtime.guardian import MARK, Guardian

__all__ = ["Launcher", "Process"]

log = logging.getLogger(__name__)

_PROCESS_MARK = "COMMUTATOR_PROCESS"
_LONGEST_LINE = 1 << 16
_LAST_LINES_S = 2.0
_STREAMS = {1: "stdout", 2: "stderr"}

OnLine = Callable[[str, str, str], None]
"""Gets process name, stream name and the line."""


class Process:
    """A running or ended process, made by ``Launcher.start``."""

    def __init__(
        self, name: str, transport: asyncio.SubprocessTransport, output: _Output, mark: str
    ) -> None:
        self.name = name
        self.mark = mark
        """What its environment holds, and that of every process which it started."""
        self.pid = transport.get_pid()
        self._transport = transport
        self._output = output

    async def wait(self) -> str:
        """Wait for the process itself to end; says how it did."""
        await asyncio.shield(self._output.exited)
        status = self._transport.get_returncode()
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    async def stop(self, grace_s: float) -> None:
        """End the process and its group: SIGTERM, and SIGKILL once ``grace_s`` is over.

        Children that left the group are killed then, too.
        """
        try:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
            async with asyncio.timeout(grace_s):
                await self.wait()
                while self._signal(0):  # noqa: ASYNC110 - the system tells nobody
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%s did not stop within %g s and is killed", self.name, grace_s)
        finally:
            self.kill()
            await asyncio.to_thread(guard.send, (), self.mark, signal.SIGKILL)
            # The last lines, often the reason for a crash, may still be in the pipes.
            await asyncio.wait({self._output.ended}, timeout=_LAST_LINES_S)
            self._transport.close()

    def kill(self) -> None:
        """SIGKILL to the whole group, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Whether anything of the group is left to take the signal."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


class Launcher:
    """Starts processes, each in a session of its own, known to the guard until they have ended."""

    def __init__(self, guardian: Guardian, on_line: OnLine, env: Mapping[str, str]) -> None:
        self._guardian = guardian
        self._on_line = on_line
        self._env = {"PYTHONUNBUFFERED": "1", **env, MARK: guardian.run_id}
        self._running: set[Process] = set()
        self._numbers = itertools.count()

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Process:
        """Start ``argv`` with ``env`` added to the environment. Raises OSError if it cannot."""
        mark = f"{name}-{next(self._numbers)}-{self._guardian.run_id}"
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Output(name, self._on_line),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**self._env, **env, _PROCESS_MARK: mark},
        )
        process = Process(name, transport, protocol, f"{_PROCESS_MARK}={mark}")
        self._running.add(process)
        self._guardian.add(process.pid)
        return process

    async def stop(self, process: Process, grace_s: float) -> None:
        """As ``Process.stop``; afterwards the process is forgotten."""
        try:
            await process.stop(grace_s)
        finally:
            self._running.discard(process)
            self._guardian.remove(process.pid)

    def kill_all(self) -> None:
        for process in self._running:
            process.kill()


class _Output(asyncio.SubprocessProtocol):
    """Cuts stdout and stderr into lines."""

    def __init__(self, name: str, on_line: OnLine) -> None:
        self._name = name
        self._on_line = on_line
        self._rest = {1: b"", 2: b""}
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Exited, and both streams are read to their end."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        for line in lines:
            self._emit(fd, line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del exc
        if fd in self._rest and (rest := self._rest.pop(fd)):
            self._emit(fd, rest)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.ended.done():
            self.ended.set_result(None)

    def _emit(self, fd: int, line: bytes) -> None:
        # A progress bar rewrites its line with carriage returns; its last state is enough.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if text.strip():
            self._on_line(self._name, _STREAMS[fd], text)
