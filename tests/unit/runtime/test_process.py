"""Child processes: their lines, how they ended, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from commutator.runtime.guardian import Guardian
from commutator.runtime.process import Launcher


class Printed(list[tuple[str, str, str]]):
    """What the processes printed, as (process, stream, line)."""

    def line(self, process: str, stream: str, message: str) -> None:
        self.append((process, stream, message))

    async def holds(self, message: str) -> None:
        async with asyncio.timeout(10):
            while not any(message == line for _, _, line in self):
                await asyncio.sleep(0.02)


@pytest.fixture
def printed() -> Printed:
    return Printed()


@pytest.fixture
async def launcher(tmp_path: Path, printed: Printed) -> AsyncIterator[Launcher]:
    guardian = Guardian(tmp_path / "state")
    await guardian.start()
    yield Launcher(guardian, printed.line, os.environ)
    await guardian.close()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def test_lines_of_both_streams(launcher: Launcher, printed: Printed) -> None:
    code = (
        "import sys\n"
        "sys.stdout.write('one\\ntwo  \\n\\n 10%\\r 50%\\r100%\\n')\n"
        "sys.stdout.write('no newline')\n"
        "sys.stderr.write('last words\\n' + 'x' * 200_000)\n"
        "sys.exit(3)"
    )
    process = await launcher.start("child", python(code), {})
    assert await process.wait() == "exited with status 3"
    await launcher.stop(process, 1)
    out = [line for _, stream, line in printed if stream == "stdout"]
    assert out == ["one", "two  ", "100%", "no newline"]
    err = [line for _, stream, line in printed if stream == "stderr"]
    assert err[0] == "last words"
    assert "".join(err[1:]) == "x" * 200_000
    assert {name for name, _, _ in printed} == {"child"}


async def test_env_is_added_and_stdin_is_empty(launcher: Launcher, printed: Printed) -> None:
    code = "import os, sys; print(os.environ['A'], 'HOME' in os.environ, repr(sys.stdin.read()))"
    process = await launcher.start("child", python(code), {"A": "b"})
    await process.wait()
    await launcher.stop(process, 1)
    assert [line for _, _, line in printed] == ["b True ''"]


async def test_what_cannot_be_started_is_an_os_error(launcher: Launcher) -> None:
    with pytest.raises(OSError):
        await launcher.start("child", ("/no/such/program",), {})


FAMILY = (
    "import signal, subprocess, sys, time\n"
    "if 'stubborn' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize(
    ("words", "ending"),
    [((), "was killed by SIGTERM"), (("stubborn",), "was killed by SIGKILL")],
)
async def test_stop_ends_the_whole_group(
    launcher: Launcher, printed: Printed, words: tuple[str, ...], ending: str
) -> None:
    process = await launcher.start("child", (*python(FAMILY), *words), {})
    async with asyncio.timeout(10):
        while not printed:
            await asyncio.sleep(0.02)
    grandchild = int(printed[0][2])
    await launcher.stop(process, 0.5)
    assert await process.wait() == ending
    assert not psutil.pid_exists(process.pid)
    async with asyncio.timeout(5):  # until init has reaped it
        while psutil.pid_exists(grandchild):
            await asyncio.sleep(0.02)


async def test_stop_ends_a_process_that_was_stopped(launcher: Launcher) -> None:
    process = await launcher.start("child", python("import time; time.sleep(600)"), {})
    psutil.Process(process.pid).suspend()
    await launcher.stop(process, 5)
    assert await process.wait() == "was killed by SIGTERM"


@pytest.mark.parametrize("code", [FAMILY, FAMILY.replace("600)'])", "600)'], process_group=0)")])
async def test_a_dead_process_leaves_no_children(
    launcher: Launcher, printed: Printed, code: str
) -> None:
    process = await launcher.start("child", python(code), {})
    async with asyncio.timeout(10):
        while not printed:
            await asyncio.sleep(0.02)
    psutil.Process(process.pid).kill()
    assert await process.wait() == "was killed by SIGKILL"
    await launcher.stop(process, 2)
    async with asyncio.timeout(5):
        while psutil.pid_exists(int(printed[0][2])):
            await asyncio.sleep(0.02)
