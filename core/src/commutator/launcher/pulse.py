"""Tells a process that hangs from one that waits for a CPU: by what its threads do, not by a clock.

On a busy machine 50 ms of work can take seconds, so a late answer alone proves nothing. A thread
that has something to do and is not stopped, however, is running or waits for a CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

LOOK_EVERY_S = 0.25
_ASK_EVERY = 2
"""Looks."""
_LOOKS = 6
"""In a row at which nothing went on, after which a process hangs. Looks are counted, not time: who
was paused itself blames nobody for it."""
_LOOKS_BESIDE_OTHERS = 20
"""While other threads of the process compute, as its first one may wait for one of them."""


@frozen(kw_only=True)
class Vitals:
    """What the kernel tells of a process, see proc(5)."""

    state: str
    """Of its first thread, in which an event loop runs: R, S, D, T, ..."""
    ran_ns: int
    """For how long the first thread has run on a CPU."""
    cpu_ticks: int
    """CPU time of all its threads."""


class Pulse:
    """Whether a process hangs. Pure: it is told what is seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: Vitals | None = None
        self._stopped = self._asleep = 0
        """Looks in a row."""

    def saw(self, processes: Mapping[int, Vitals], *, owes: bool) -> str | None:
        """What is wrong, as the end of a sentence that begins with its name; None: nothing.

        ``processes``: this one and its children, by process id. ``owes``: an answer is due.
        """
        now, before = processes.get(self._pid), self._before
        self._before = now
        stopped = any(one.state == "T" for one in processes.values())
        self._stopped = self._stopped + 1 if stopped else 0
        if self._stopped >= _LOOKS:
            return "hangs: it, or a child of it, is stopped"
        still = (
            owes
            and now is not None
            and before is not None
            and now.state in ("S", "D")
            and now.ran_ns == before.ran_ns
        )
        self._asleep = self._asleep + 1 if still else 0
        if now is None or before is None or self._asleep < _LOOKS:
            return None
        if now.cpu_ticks != before.cpu_ticks and self._asleep < _LOOKS_BESIDE_OTHERS:
            return None
        where = "in the kernel" if now.state == "D" else "for something"
        return f"hangs: it waits {where}, and has answered nothing meanwhile"


def vitals_of(pid: int) -> dict[int, Vitals]:
    """A process and the children of its first thread, and theirs; none where there is no /proc."""
    found: dict[int, Vitals] = {}
    left = [pid]
    while left:
        one = left.pop()
        folder = Path(f"/proc/{one}")
        with suppress(OSError, ValueError, IndexError):  # it has ended
            # The name in parentheses may hold anything.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            ran_ns = int((folder / "schedstat").read_text().split()[0])
            ticks = int(fields[11]) + int(fields[12])
            found[one] = Vitals(state=fields[0], ran_ns=ran_ns, cpu_ticks=ticks)
            left += map(int, (folder / f"task/{one}/children").read_text().split())
    return found


async def until_it_hangs(pid: int, ask: Callable[[], Awaitable[object]] | None) -> str:
    """Return when a process hangs, and what it does: it is stopped, or does not answer ``ask``.

    Whatever ``ask`` returns or raises is an answer.
    """
    pulse, asked, looks = Pulse(pid), None, 0
    try:
        while True:
            if ask is not None and looks % _ASK_EVERY == 0 and (asked is None or asked.done()):
                asked = asyncio.ensure_future(ask())
            looks += 1
            await asyncio.sleep(LOOK_EVERY_S)
            problem = pulse.saw(vitals_of(pid), owes=asked is not None and not asked.done())
            if problem is not None:
                return problem
            if asked is not None and asked.done() and not asked.cancelled():
                asked.exception()  # marks it as read
    finally:
        if asked is not None:
            asked.cancel()
