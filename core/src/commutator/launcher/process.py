"""The launcher `process`: child processes on this machine, each with its whole process group."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Awaitable, Callable

from commutator.contract.launcher import LaunchedProcess, Launcher, LauncherContext, LaunchPlan
from commutator.launcher import guard
from commutator.launcher.guardian import MARK, Guardian
from commutator.launcher.ports import PortPicker
from commutator.launcher.pulse import until_it_hangs, vitals_of

__all__ = ["LocalLauncher", "LocalProcess"]

log = logging.getLogger(__name__)

_PROCESS_MARK = "COMMUTATOR_PROCESS"
"""The environment variable that names one process; its children inherit it."""

_LONGEST_LINE = 1 << 16
"""Bytes; a longer line comes in several pieces."""

_LAST_LINES_S = 2.0
"""Longest wait for the last output of a process that has ended."""

_STDERR = 2
_STREAMS = {1: "stdout", _STDERR: "stderr"}
_LONGEST_REASON = 300
"""Characters of an exit's reason."""
_REASON_S = 0.5
"""Longest wait for it."""


class _Output(asyncio.SubprocessProtocol):
    """Cuts stdout and stderr of one process into lines."""

    def __init__(self, name: str, on_line: Callable[[str, str, str], None]) -> None:
        self._name = name
        self._on_line = on_line
        self._rest = {1: b"", 2: b""}
        self.last_error: str = ""
        """The last line on stderr that is not indented, often the reason for a crash."""
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the process exited and both streams are read to their end."""

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
            if fd == _STDERR and not text[0].isspace():
                self.last_error = text.strip()[:_LONGEST_REASON]
            self._on_line(self._name, _STREAMS[fd], text)


class LocalProcess(LaunchedProcess):
    """A child process and its process group."""

    def __init__(
        self,
        name: str,
        transport: asyncio.SubprocessTransport,
        output: _Output,
        mark: str,
        on_stopped: Callable[[LocalProcess], None],
    ) -> None:
        self.pid: int = transport.get_pid()
        """Also the id of its process group."""
        self._name = name
        self._transport = transport
        self._output = output
        self._mark = mark
        self._on_stopped = on_stopped

    async def wait(self) -> str:
        await asyncio.shield(self._output.exited)
        status = self._transport.get_returncode()
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        if not status:
            return f"exited with status {status}"
        # Its last lines may still be in the pipe.
        await asyncio.wait({self._output.ended}, timeout=_REASON_S)
        reason = self._output.last_error
        return f"exited with status {status}" + (f": {reason}" if reason else "")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the group; then SIGKILL, also to children that left the group."""
        try:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
            async with asyncio.timeout(grace_s):
                await self.wait()
                while self._signal(0):  # noqa: ASYNC110 - no event says that a group is empty
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%s did not stop within %g s and is killed", self._name, grace_s)
        finally:
            try:
                self.kill()
                await asyncio.to_thread(guard.send, (), self._mark, signal.SIGKILL)
                # The last lines, often the reason for a crash, may still be in the pipes.
                await asyncio.wait({self._output.ended}, timeout=_LAST_LINES_S)
                self._transport.close()
            finally:
                self._on_stopped(self)

    def cpu_s(self) -> float:
        ticks = sum(one.cpu_ticks for one in vitals_of(self.pid).values())
        return ticks / os.sysconf("SC_CLK_TCK")

    async def end_when_it_hangs(self, ask: Callable[[], Awaitable[object]] | None = None) -> str:
        problem = await until_it_hangs(self.pid, ask)
        self.kill()
        return problem

    def interrupt(self) -> None:
        """SIGINT to the group, as Ctrl-C."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the whole group, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; False when nothing of it is left."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


class LocalLauncher(Launcher):
    """Starts each process in its own session, and registers it with the guard until it ends."""

    def __init__(self, context: LauncherContext) -> None:
        self._guardian = Guardian(context.folder)
        self._on_line = context.on_line
        self._listen = context.listen
        self._env = {"PYTHONUNBUFFERED": "1", **context.env, MARK: self._guardian.run_id}
        self._ports = PortPicker()
        self._running: set[LocalProcess] = set()
        self._numbers = itertools.count()

    async def open(self) -> None:
        await self._guardian.start()

    def listen_at(self, *, loopback: bool = False) -> tuple[str, int]:
        host = "127.0.0.1" if loopback else self._listen
        return host, self._ports.pick(host)

    async def start(self, name: str, plan: LaunchPlan) -> LocalProcess:
        mark = f"{name}-{next(self._numbers)}-{self._guardian.run_id}"
        transport, output = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Output(name, self._on_line),
            *plan.argv,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**self._env, **plan.env, _PROCESS_MARK: mark},
        )
        process = LocalProcess(name, transport, output, f"{_PROCESS_MARK}={mark}", self._forget)
        self._running.add(process)
        self._guardian.add(process.pid, plan.drain_s)
        return process

    def kill_all(self) -> None:
        for process in self._running:
            process.kill()

    async def close(self) -> None:
        await self._guardian.close()

    def _forget(self, process: LocalProcess) -> None:
        self._running.discard(process)
        self._guardian.remove(process.pid)
