"""Child processes: their lines, how they ended, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from commutator.contract.launcher import LauncherContext
from commutator.launcher.process import LocalLauncher
from commutator_testing.launchers import PrintedLines, python_plan


@pytest.fixture
def printed() -> PrintedLines:
    return PrintedLines()


@pytest.fixture
async def launcher(tmp_path: Path, printed: PrintedLines) -> AsyncIterator[LocalLauncher]:
    context = LauncherContext(folder=tmp_path / "state", env=os.environ, on_line=printed.line)
    launcher = LocalLauncher(context)
    await launcher.open()
    yield launcher
    await launcher.close()


async def test_lines_of_both_streams(launcher: LocalLauncher, printed: PrintedLines) -> None:
    code = (
        "import sys\n"
        "sys.stdout.write('one\\ntwo  \\n\\n 10%\\r 50%\\r100%\\n')\n"
        "sys.stdout.write('no newline')\n"
        "sys.stderr.write('last words\\n' + 'x' * 200_000)\n"
        "sys.exit(3)"
    )
    process = await launcher.start("child", python_plan(code))
    assert await process.wait() == f"exited with status 3: {'x' * 300}"
    await process.stop(1)
    out = [line for _, stream, line in printed if stream == "stdout"]
    assert out == ["one", "two  ", "100%", "no newline"]
    err = [line for _, stream, line in printed if stream == "stderr"]
    assert err[0] == "last words"
    assert "".join(err[1:]) == "x" * 200_000
    assert {name for name, _, _ in printed} == {"child"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", ""),
        ("Traceback:\n  File 1\nValueError: no model\n  ~~~^^\n", ": ValueError: no model"),
        ("no coal left", ": no coal left"),  # and no end of the line
    ],
)
async def test_an_exit_says_what_the_process_said_last(
    launcher: LocalLauncher, said: str, reason: str
) -> None:
    code = f"import sys; sys.stderr.write({said!r}); print('later'); sys.exit(1)"
    process = await launcher.start("child", python_plan(code))
    assert await process.wait() == f"exited with status 1{reason}"
    await process.stop(1)


async def test_env_is_added_and_stdin_is_empty(
    launcher: LocalLauncher, printed: PrintedLines
) -> None:
    code = "import os, sys; print(os.environ['A'], 'HOME' in os.environ, repr(sys.stdin.read()))"
    process = await launcher.start("child", python_plan(code, A="b"))
    await process.wait()
    await process.stop(1)
    assert [line for _, _, line in printed] == ["b True ''"]


FAMILY = (
    "import signal, subprocess, sys, time\n"
    "if 'stubborn' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [((), "was killed by SIGTERM"), (("stubborn",), "was killed by SIGKILL")],
)
async def test_stop_ends_the_whole_group(
    launcher: LocalLauncher, printed: PrintedLines, arguments: tuple[str, ...], ending: str
) -> None:
    process = await launcher.start("child", python_plan(FAMILY, *arguments))
    await printed.until()
    grandchild = int(printed[0][2])
    await process.stop(0.5)
    assert await process.wait() == ending
    assert not psutil.pid_exists(process.pid)
    async with asyncio.timeout(60):  # until init has reaped it
        while psutil.pid_exists(grandchild):
            await asyncio.sleep(0.02)


async def test_stop_ends_a_process_that_was_stopped(launcher: LocalLauncher) -> None:
    process = await launcher.start("child", python_plan("import time; time.sleep(600)"))
    psutil.Process(process.pid).suspend()
    await process.stop(5)
    assert await process.wait() == "was killed by SIGTERM"


@pytest.mark.parametrize("code", [FAMILY, FAMILY.replace("600)'])", "600)'], process_group=0)")])
async def test_a_dead_process_leaves_no_children(
    launcher: LocalLauncher, printed: PrintedLines, code: str
) -> None:
    process = await launcher.start("child", python_plan(code))
    await printed.until()
    psutil.Process(process.pid).kill()
    assert await process.wait() == "was killed by SIGKILL"
    await process.stop(2)
    async with asyncio.timeout(60):
        while psutil.pid_exists(int(printed[0][2])):
            await asyncio.sleep(0.02)
