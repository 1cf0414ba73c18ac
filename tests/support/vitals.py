"""Memory and CPU time of a cluster's processes over a long run, and the lines of that run's log."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from attrs import define, field
from tests.support.cluster_views import Demo
from tests.support.processes import Growth, command_of, cpu_s, rss_mb

__all__ = ["FRONT_DOOR", "Vitals", "role_of", "say"]

_SAMPLE_S = 30.0
_WARM_UP_S = 300.0
"""Of each process: caches of bounded size fill."""
_LEAST_LIFE_S = 600.0
"""After the warm-up: of shorter lives no slope is judged."""
FRONT_DOOR = "front door"


def say(text: str) -> None:
    """A line of the run's log."""
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", flush=True)


@define
class Vitals:
    """Memory and CPU time of every process of a cluster, sampled in a block."""

    demo: Demo
    samples: dict[tuple[str, int], list[tuple[float, float]]] = field(
        factory=lambda: defaultdict(list)
    )
    """(seconds, MiB) by what the process is, and its id: those of front doors and workers."""
    _cpu_s: dict[int, float] = field(factory=dict)
    _began_s: float = field(factory=time.monotonic)
    _stop: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="vitals")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            now_s = time.monotonic()
            for host in (*self.demo.hosts, *self.demo.others):
                for pid in host.pids():
                    with suppress(OSError):
                        self._cpu_s[pid] = cpu_s(pid)
                        if host in self.demo.hosts:
                            name = f"{host.name} {role_of(command_of(pid))}"
                            self.samples[name, pid].append((now_s, rss_mb(pid)))

    def say_cpu(self) -> None:
        """Print how much CPU time the cluster used."""
        length_s = time.monotonic() - self._began_s
        say(f"the cluster used {sum(self._cpu_s.values()) / length_s:.2f} of a CPU")

    def grown(self) -> Sequence[str]:
        """Processes whose memory is not flat. Prints the figures of all that lived long enough."""
        found = []
        for (name, pid), series in sorted(self.samples.items()):
            settled = [one for one in series if one[0] >= series[0][0] + _WARM_UP_S]
            if not settled or settled[-1][0] - settled[0][0] < _LEAST_LIFE_S:
                continue
            growth = Growth.of(settled)
            minutes = (series[-1][0] - series[0][0]) / 60
            say(
                f"memory of {name} ({pid}), {minutes:.0f} minutes old: {growth.settled_mb:.1f} MiB "
                f"after the warm-up, {growth.end_mb:.1f} at the end, slope "
                f"{growth.slope_mb_per_hour:+.1f} MiB an hour"
            )
            if not growth.is_flat:
                found.append(f"{name}: {growth}")
        return found


def role_of(command: str) -> str:
    for part, role in {
        "guard.py": "guard",
        "frontend.process": FRONT_DOOR,
        "commutator_": "worker",
        "commutator ": "supervisor",
    }.items():
        if part in command:
            return role
    return "other"
