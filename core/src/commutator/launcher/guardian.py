"""The supervisor's side of the guard: names the live processes, replaces a guard that died."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from pathlib import Path

from commutator.launcher import guard

log = logging.getLogger(__name__)

MARK = "COMMUTATOR_RUN"
"""The environment variable that marks the processes of one run for the guard."""


class Guardian:
    """Starts the guard, which removes ``folder`` once every process has ended."""

    def __init__(self, folder: Path) -> None:
        self.run_id = uuid.uuid4().hex
        self._folder = folder
        self._groups: dict[int, float] = {}
        """How long each drains, in seconds."""
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__),
            *(f"{MARK}={self.run_id}", str(self._folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={},
        )
        for group, drain_s in self._groups.items():
            self._send(f"+{group} {drain_s:g}")
        self._watching = asyncio.create_task(self._replace_when_it_dies(self._process))

    def add(self, group: int, drain_s: float) -> None:
        """A process group began that may take ``drain_s`` seconds to end, before the others."""
        self._groups[group] = drain_s
        self._send(f"+{group} {drain_s:g}")

    def remove(self, group: int) -> None:
        """A process group has ended completely."""
        self._groups.pop(group, None)
        self._send(f"-{group}")

    async def close(self, timeout_s: float = 5.0) -> None:
        """Let the guard end what is left, remove the folder, and exit. Idempotent."""
        process, self._process = self._process, None
        if self._watching is not None:
            self._watching.cancel()
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                log.warning("the guard is still ending processes; it continues in the background")

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def _replace_when_it_dies(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        log.warning("the guard died (exit status %s); starting another", process.returncode)
        await asyncio.sleep(0.2)
        await self.start()
