"""What processes take of a machine: whether their memory grows, and whether they get a CPU."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from attrs import frozen

__all__ = ["Growth", "command_of", "cpu_s", "processes_of", "rss_mb", "waited_s"]

_MOST_SLOPE_MB_PER_HOUR = 24.0
_MOST_GROWTH = 0.08
"""Beside the slope: the part by which the last fifth may exceed the first."""


@frozen
class Growth:
    """How the memory of one process developed after its warm-up."""

    settled_mb: float
    """The median of the first fifth of the time; ``end_mb``: of the last."""
    end_mb: float
    slope_mb_per_hour: float

    @classmethod
    def of(cls, series: Sequence[tuple[float, float]]) -> Self:
        """From (seconds, MiB) of at least two different times."""
        slope, _ = statistics.linear_regression(
            [second for second, _ in series], [mb for _, mb in series]
        )
        fifth = max(1, len(series) // 5)
        settled = statistics.median(mb for _, mb in series[:fifth])
        end = statistics.median(mb for _, mb in series[-fifth:])
        return cls(settled, end, slope * 3600)

    @property
    def is_flat(self) -> bool:
        """Caches may still fill a little; a leak shows in both figures."""
        return (
            self.slope_mb_per_hour <= _MOST_SLOPE_MB_PER_HOUR
            or self.end_mb <= self.settled_mb * (1 + _MOST_GROWTH)
        )


def processes_of(parent: int) -> dict[int, str]:
    """The descendants of a process, and itself, with their command lines."""
    children: dict[int, list[int]] = defaultdict(list)
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            children[int(stat[1])].append(int(folder.name))
            names[int(folder.name)] = command_of(int(folder.name))
    found, left = {}, [parent]
    while left:
        pid = left.pop()
        found[pid] = names.get(pid, "")
        left += children[pid]
    return found


def command_of(pid: int) -> str:
    """The command line of a process. Raises OSError."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return line.replace(b"\0", b" ").decode(errors="replace")


def rss_mb(pid: int) -> float:
    """The memory that a process occupies. Raises OSError."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(pid: int) -> float:
    """How long the main thread of a process has waited for a CPU. Raises OSError."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
