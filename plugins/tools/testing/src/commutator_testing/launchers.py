"""The conformance suite for launchers: subclass it, define a launcher, run pytest."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from commutator.launcher import Launcher, LauncherContext, LaunchPlan

__all__ = [
    "LauncherContract",
    "PrintedLines",
    "python_plan",
]

_FOREVER = "import time; print('started', flush=True); time.sleep(600)"


def python_plan(code: str, *arguments: str, **env: str) -> LaunchPlan:
    """A plan that runs ``code`` in this Python."""
    return LaunchPlan(argv=(sys.executable, "-c", code, *arguments), address="", env=env)


class PrintedLines(list[tuple[str, str, str]]):
    """What the processes printed: process name, stream name and line."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def line(self, process: str, stream: str, message: str) -> None:
        """Pass it as ``LauncherContext.on_line``."""
        self.append((process, stream, message))
        self._more.set()

    async def until(self, count: int = 1) -> None:
        """Wait until there are ``count`` lines. Raises TimeoutError after 30 s."""
        async with asyncio.timeout(30):
            while len(self) < count:
                self._more.clear()
                await self._more.wait()


@pytest.mark.asyncio
class LauncherContract:
    """What every launcher must do."""

    documented_in = "Launcher in docs/reference/contract.md"

    def make_launcher(self, context: LauncherContext) -> Launcher:
        """A launcher that is not open yet."""
        raise NotImplementedError("return a fresh instance of the launcher under test")

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[tuple[Launcher, PrintedLines]]:
        """An open launcher, and the lines that its processes print."""
        printed = PrintedLines()
        context = LauncherContext(folder=folder, env=os.environ, on_line=printed.line)
        launcher = self.make_launcher(context)
        await launcher.open()
        try:
            yield launcher, printed
        finally:
            await launcher.close()

    async def test_both_streams_come_by_the_line(self, tmp_path: Path) -> None:
        code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code))
            assert (await process.wait()).startswith("exited with status 3")
            await process.stop(5)
        assert sorted(printed) == [("child", "stderr", "two"), ("child", "stdout", "one")]

    async def test_a_plan_adds_to_the_environment(self, tmp_path: Path) -> None:
        code = "import os; print(os.environ['ADDED'], 'PATH' in os.environ)"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code, ADDED="yes"))
            await process.wait()
            await process.stop(5)
        assert printed == [("child", "stdout", "yes True")]

    async def test_what_cannot_be_started_is_an_os_error(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, _):
            plan = LaunchPlan(argv=("/no/such/program",), address="")
            with pytest.raises(OSError, match="No such file"):
                await launcher.start("child", plan)

    async def test_stop_ends_a_process_and_wait_says_so(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(_FOREVER))
            waiting = asyncio.create_task(process.wait())
            await printed.until()
            await process.stop(10)
            assert await waiting == await process.wait()

    async def test_a_process_that_ignores_the_request_is_ended_by_force(
        self, tmp_path: Path
    ) -> None:
        code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_FOREVER}"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code))
            await printed.until()
            await process.stop(0.2)
            async with asyncio.timeout(10):
                await process.wait()

    @pytest.mark.parametrize(
        "end", [lambda launcher: launcher.kill_all(), lambda _: None], ids=["kill_all", "close"]
    )
    async def test_nothing_is_left_at_the_end(
        self, tmp_path: Path, end: Callable[[Launcher], None]
    ) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        async with self.opened(folder) as (launcher, printed):
            process = await launcher.start("child", python_plan(_FOREVER))
            await printed.until()
            end(launcher)
        async with asyncio.timeout(10):
            await process.wait()
        assert not folder.exists()
        await process.stop(1)

    async def test_places_to_listen_at_are_free_and_not_given_twice(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, _):
            places = [launcher.listen_at() for _ in range(20)]
        assert len(set(places)) == len(places)
        for place in places:
            socket.create_server(place).close()
