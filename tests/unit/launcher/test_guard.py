"""The guard alone: it ends the groups that it was given, and all processes with its mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from commutator.launcher import guard

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize(
    ("lines", "groups"),
    [
        ([b"+12 0\n", b"+13 4.5\n", b"-12\n"], {13: 4.5}),
        ([b"+12 0\n", b"+1"], {12: 0.0}),  # cut short: it may have meant 13
        ([b"\n", b"+\n", b"x\n", b"+1x 1\n", b"-5\n"], {}),
    ],
)
def test_the_groups_that_it_knows(lines: list[bytes], groups: dict[int, float]) -> None:
    known: Mapping[int, float] = {}
    for line in lines:
        known = guard.apply(known, line)
    assert known == groups


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_when_the_pipe_ends_everything_ends(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    mark = "COMMUTATOR_TEST_GUARD=1"
    env = {**os.environ, "COMMUTATOR_TEST_GUARD": "1"}
    named = subprocess.Popen(SLEEP, start_new_session=True)
    frozen = subprocess.Popen(SLEEP, start_new_session=True)
    marked = subprocess.Popen(SLEEP, start_new_session=True, env=env)
    spared = subprocess.Popen(SLEEP, start_new_session=True)
    sleepers += [named, frozen, marked, spared]
    psutil.Process(frozen.pid).suspend()
    folder = tmp_path / "state"
    (folder / "inner").mkdir(parents=True)
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert watcher.stdin is not None
    groups = "".join(f"+{one.pid} 0\n" for one in (named, frozen, spared))
    watcher.stdin.write(f"{groups}-{spared.pid}\n".encode())
    watcher.stdin.flush()
    while not _ignores_sigterm(watcher.pid):
        time.sleep(0.01)
    watcher.terminate()
    time.sleep(0.3)
    assert watcher.poll() is None
    assert [p.poll() for p in sleepers] == [None] * 4
    watcher.stdin.close()
    assert watcher.wait(10) == 0
    for process in (named, frozen, marked):
        assert process.wait(5) < 0
    assert spared.poll() is None
    assert not folder.exists()


DRAINS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(time.sleep(float(sys.argv[1]))))
print(flush=True)
time.sleep(600)
"""


def test_those_that_drain_end_before_what_they_need(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    needed = subprocess.Popen(SLEEP, start_new_session=True)
    argv = [sys.executable, "-S", "-c", DRAINS]
    quick, slow = (
        subprocess.Popen([*argv, takes], start_new_session=True, stdout=subprocess.PIPE)
        for takes in ("0.5", "600")
    )
    sleepers += [needed, quick, slow]
    for one in (quick, slow):
        assert one.stdout is not None
        with one.stdout:
            one.stdout.readline()
    ending = threading.Thread(
        target=guard.end, args=({needed.pid: 0.0, quick.pid: 1.0, slow.pid: 1.5}, "")
    )
    ending.start()
    assert quick.wait(5) == 0
    assert needed.poll() is None
    ending.join(10)
    assert (needed.wait(5), slow.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy; runpy.run_path({guard.__file__!r}); print('fine')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fine\n"
