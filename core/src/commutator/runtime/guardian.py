"""The supervisor's end of the guard process: tells it what is alive, and replaces it if it dies."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from pathlib import Path

from commutator.runtime import guard

__all__ = ["MARK", "Guardian"]

log = logging.getLogger(__name__)

MARK = "COMMUTATOR_RUN"
"""The environment variable by which the guard knows the processes of one run."""


class Guardian:
    """Starts the guard and keeps it informed. ``folder`` is removed when everything has ended."""

    def __init__(self, folder: Path) -> None:
        self.run_id = uuid.uuid4().hex
        self._folder = folder
        self._groups: set[int] = set()
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
        for group in self._groups:
            self._tell("+", group)
        self._watching = asyncio.create_task(self._replace_when_it_dies(self._process))

    def add(self, group: int) -> None:
        """A process group began."""
        self._groups.add(group)
        self._tell("+", group)

    def remove(self, group: int) -> None:
        """A process group has ended completely."""
        self._groups.discard(group)
        self._tell("-", group)

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
                log.warning("the guard is still ending processes; it goes on by itself")

    def _tell(self, sign: str, group: int) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{sign}{group}\n".encode())

    async def _replace_when_it_dies(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        log.warning("the guard died (exit status %s); starting another", process.returncode)
        await asyncio.sleep(0.2)
        await self.start()
