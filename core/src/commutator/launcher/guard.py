"""Outlives the supervisor and ends the processes that it left. Standard library only.

Run as ``python -I -S guard.py MARK FOLDER``. Its standard input is a pipe that only the supervisor
holds: lines ``+PGID DRAIN_S`` and ``-PGID`` name the process groups that are alive. When the pipe
ends, however the supervisor ended, the groups that drain are told to end first and get their time,
while what they need runs on. Then every named group and every process whose environment carries
MARK is killed, and FOLDER is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

GRACE_S = 2.0
POLL_S = 0.05


def apply(groups: Mapping[int, float], line: bytes) -> Mapping[int, float]:
    """The groups after one line from the supervisor, and how long each drains, in seconds.

    A line cut short by its death is ignored.
    """
    sign, (number, *drain_s) = line[:1], line[1:].split() or [b""]
    if not (line.endswith(b"\n") and number.isdigit()):
        return groups
    others = {group: groups[group] for group in groups if group != int(number)}
    return {**others, int(number): float(*drain_s)} if sign == b"+" else others


def marked(mark: str) -> list[int]:
    """Processes whose initial environment has ``mark``, also those that left their group."""
    found: list[int] = []
    if not mark:
        return found
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        try:
            if pid != os.getpid() and mark.encode() in entry.read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue  # it ended, or is not ours
    return found


def send(groups: Iterable[int], mark: str, number: signal.Signals) -> bool:
    """Signal all remaining processes; False when there are none."""
    targets = [-group for group in groups] + marked(mark)
    alive = False
    for target in targets:
        try:
            os.kill(target, number)
            if number is signal.SIGTERM:
                os.kill(target, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
            alive = True
        except (ProcessLookupError, PermissionError):
            pass
    return alive


def end(groups: Mapping[int, float], mark: str) -> None:
    """SIGTERM, first to those that drain; a short grace, then SIGKILL while processes remain."""
    draining = {group for group, drain_s in groups.items() if drain_s}
    send(draining, "", signal.SIGTERM)
    _wait(max(groups.values(), default=0.0), lambda: any_alive(draining, ""))
    if not send(groups, mark, signal.SIGTERM):
        return
    _wait(GRACE_S, lambda: any_alive(groups, mark))
    for _ in range(3):
        if not send(groups, mark, signal.SIGKILL):
            return
        time.sleep(POLL_S)


def _wait(longest_s: float, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline and alive():
        time.sleep(POLL_S)


def any_alive(groups: Iterable[int], mark: str) -> bool:
    for group in groups:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            continue
        return True
    return bool(marked(mark))


def main(mark: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: Mapping[int, float] = {}
    for line in sys.stdin.buffer:
        groups = apply(groups, line)
    end(groups, mark)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
