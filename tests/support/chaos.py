"""Chaos: a plan of faults befalls a running cluster, and everything is judged from outside.

What is asked: is every request answered, and rightly; do front doors, etcd and workers know the
same once a fault is over; does anything leak. docs/how-to/cluster.md says how to run it.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from subprocess import CalledProcessError

from attrs import define
from tests.support.chaos_plan import Fault, Kind
from tests.support.clocks import Clocks
from tests.support.cluster_faults import Faults
from tests.support.cluster_views import (
    WORKERS,
    Demo,
    age_s,
    get,
    indexed_blocks,
    own_count,
    peers_of,
    ready_workers,
    registered,
    seen_by,
    stored_blocks,
)
from tests.support.hosts import Host
from tests.support.processes import command_of, waited_s
from tests.support.steady_traffic import Outcome, SteadyTraffic
from tests.support.vitals import FRONT_DOOR, role_of, say

from commutator.engine.client import LOST_AFTER_S

__all__ = ["Chaos", "Class", "Healing", "Struck"]

LEASE_S = 5.0
"""``runtime.lease_s``, by default."""
CONVERGED_S = 2.0
LOADED_S = 2.0
"""What a loaded machine takes to notice what the test looks for."""
_WHOLE_S = 300.0
_POLL_S = 0.25
_FRESH_S = 2.5
_LOST = (Kind.HOST_VANISHED, Kind.HOST_KILLED, Kind.HOST_PAUSED, Kind.CUT_FROM_ALL)
"""Front doors elsewhere stop sending to these hosts' workers."""
_MIGRATED = re.compile(r"request (\S+) migrated from")


class Class(StrEnum):
    """What became of a request."""

    EQUAL = "equal"
    MIGRATED = "migrated, equal"
    REFUSED = "refused by a front door"
    CUT_OFF = "refused by a front door that was cut off from all workers"
    DOOR_GONE = "refused as the front door was gone"
    IN_FLIGHT = "in flight at a front door that was killed"
    LOST = "lost"
    WRONG = "wrong"


@define
class Struck:
    """A fault that happened. Times are seconds of the monotonic clock."""

    fault: Fault
    began_s: float
    happened_s: float = 0.0
    """By then what was killed is dead; it takes a moment from ``began_s`` on."""
    over_s: float = 0.0
    served_s: float = math.inf
    """From then on both front doors answered."""


@define
class Healing:
    """After a fault, until all is as before."""

    answers_s: float = 0.0
    """Until front doors and etcd answer; what was killed has to start."""
    whole_s: float = 0.0
    """From then on until all workers are ready."""
    views_s: float = 0.0
    """The longest time meanwhile in which front doors did not know those workers that etcd has."""
    indexes_s: float = 0.0
    """The same for the blocks of each worker, which both front doors have to know."""
    starved_s: float = 0.0
    """How long meanwhile a front door and this process waited for a CPU."""


@define
class Spell:
    """How long something did not hold in one go, from a moment on."""

    since_s: float
    holds: bool = False
    longest_s: float = 0.0

    def note(self, holds: bool | None) -> None:
        """It holds now, or does not; None when that is not known."""
        if holds is None:
            return
        now_s = time.monotonic()
        if not self.holds:
            self.longest_s = max(self.longest_s, now_s - self.since_s)
        elif not holds:
            self.since_s = now_s
        self.holds = holds


class Chaos:
    """Faults for a running cluster, and what is known of it."""

    def __init__(self, demo: Demo, clocks: Clocks) -> None:
        """``clocks``: those that the hosts of the cluster run with."""
        self.demo = demo
        self.doors = demo.hosts[:2]
        self.struck: list[Struck] = []
        self.healings: list[Healing] = []
        self.outcomes: Counter[Class] = Counter()
        self.longest_gap_s = 0.0
        """In a stream through a front door that was not struck itself."""
        self.late: list[str] = []
        """Requests that were sent to a lost host after the time in which it must be noticed."""
        self.problems: list[Outcome] = []
        """Requests that were lost, answered wrongly, or refused by a front door."""
        self._faults = Faults(demo, clocks)

    def run(
        self,
        faults: Sequence[Fault],
        traffic: Callable[[], SteadyTraffic],
        expected: Mapping[str, str],
        round_s: float,
        length_s: float,
    ) -> None:
        """Strike as planned under traffic, which ends each ``round_s`` so that all can be counted.

        ``length_s``: at least so long. Raises RuntimeError when the cluster does not heal.
        """
        began_s = time.monotonic()
        groups = _overlapping(faults)
        while groups or time.monotonic() < began_s + length_s:
            round_ends_s = time.monotonic() + round_s
            with traffic() as running:
                while groups and time.monotonic() < round_ends_s:
                    self._strike(groups.pop(0), began_s)
                    self.heal()
                left_s = began_s + length_s - time.monotonic()
                if not groups and left_s > 0:
                    time.sleep(left_s)
                self._judge(running.outcomes(), expected)
            self.count_all()

    def _strike(self, faults: Sequence[Fault], began_s: float) -> None:
        """Faults that overlap, each for its time."""
        moments = [(one.at_s, number, True) for number, one in enumerate(faults)]
        moments += [(one.ends_s, number, False) for number, one in enumerate(faults)]
        shift_s = max(0.0, time.monotonic() - began_s - faults[0].at_s)  # healing took longer
        undo: dict[int, tuple[ExitStack, Struck]] = {}
        for at_s, number, begins in sorted(moments, key=lambda one: (one[0], one[1], not one[2])):
            time.sleep(max(0.0, began_s + shift_s + at_s - time.monotonic()))
            if begins:
                fault = faults[number]
                say(f"{time.monotonic() - began_s:6.0f} s  {fault}")
                undo[number] = ExitStack(), Struck(fault, time.monotonic())
                self.struck.append(undo[number][1])
                undo[number][0].enter_context(self._faults.befall(fault))
                undo[number][1].happened_s = time.monotonic()
            else:
                stack, struck = undo.pop(number)
                stack.close()
                struck.over_s = time.monotonic()

    def heal(self) -> Healing:
        """Wait until the cluster is whole, with nothing wrong any more. Raises RuntimeError."""
        over_s = time.monotonic()
        before_s = self._waited_s()
        self.demo.until("front doors", lambda: all(map(_answers, self.doors)), _WHOLE_S)
        for struck in self.struck:
            struck.served_s = min(struck.served_s, time.monotonic())
        self.demo.until_etcd_answers()
        answers_s = time.monotonic()
        views, indexes = Spell(answers_s), Spell(answers_s)

        def is_whole() -> bool:
            time.sleep(_POLL_S)
            views.note(self._views_are_equal())
            indexes.note(self._indexes_are_equal())
            return views.holds and indexes.holds and self._is_whole()

        self.demo.until("the cluster to be whole again", is_whole, _WHOLE_S)
        took_s = time.monotonic() - answers_s
        waits_s = {pid: total - before_s.get(pid, 0.0) for pid, total in self._waited_s().items()}
        mine_s = waits_s.pop(os.getpid())
        starved_s = min(took_s, mine_s + max(waits_s.values(), default=0.0))
        healing = Healing(answers_s - over_s, took_s, views.longest_s, indexes.longest_s, starved_s)
        self.healings.append(healing)
        say(
            f"          all answer after {healing.answers_s:.1f} s, whole {healing.whole_s:.1f} s "
            f"later; views differed for {healing.views_s:.1f} s, indexes for "
            f"{healing.indexes_s:.1f} s; waited for a CPU for {healing.starved_s:.1f} s"
        )
        return healing

    def _waited_s(self) -> dict[int, float]:
        """How long front doors and this process have waited for a CPU."""
        found = {os.getpid(): waited_s(os.getpid())}
        for door in self.doors:
            for pid in door.pids():
                with suppress(OSError):
                    if role_of(command_of(pid)) == FRONT_DOOR:
                        found[pid] = waited_s(pid)
        return found

    def _views_are_equal(self) -> bool | None:
        with suppress(CalledProcessError):
            one, other = self.doors
            return _equal(
                lambda: registered(self.demo), lambda: seen_by(one), lambda: seen_by(other)
            )
        return False

    def _indexes_are_equal(self) -> bool | None:
        with suppress(OSError):
            one, other = self.doors
            return _equal(lambda: indexed_blocks(one), lambda: indexed_blocks(other))
        return False

    def _is_whole(self) -> bool:
        return all(
            ready_workers(door) == WORKERS and peers_of(door) == 1 and age_s(door) < _FRESH_S
            for door in self.doors
        )

    def count_all(self) -> None:
        """Without traffic: workers hold nothing, and front doors know what they cache.

        Raises RuntimeError with what differs.
        """
        door = self.doors[0]
        wrong = ""

        def is_right() -> bool:
            nonlocal wrong
            time.sleep(_POLL_S)
            counts = {name: own_count(door, name) for name in seen_by(door)}
            indexes = [indexed_blocks(one) for one in self.doors]
            blocks = {(name, "device"): count.cached_blocks for name, count in counts.items()}
            own = {place: number for place, number in blocks.items() if number}
            own |= stored_blocks(door)
            wrong = f"counted by workers: {counts}, {own}, by front doors: {indexes}"
            return indexes == [own, own] and all(
                count.requests == count.held_blocks == 0 for count in counts.values()
            )

        try:
            self.demo.until("equal counts", is_right, 10.0)
        except RuntimeError as error:
            raise RuntimeError(f"{wrong}\n{error}") from None
        total = sum(indexed_blocks(door).values())
        say(f"          counted: no request left, the same {total} blocks at workers and doors")

    def _judge(self, outcomes: Sequence[Outcome], expected: Mapping[str, str]) -> None:
        """Give each request its class."""
        moved = self._migrated()
        found: Counter[Class] = Counter()
        for one in outcomes:
            what = self._class_of(one, expected[one.prompt], moved)
            found[what] += 1
            if what in (Class.LOST, Class.WRONG, Class.REFUSED):
                self.problems.append(one)
                say(f"{what}: {one}")
            if not self._own_stall(one):
                self.longest_gap_s = max(self.longest_gap_s, one.longest_gap_s)
            self._note_if_late(one)
        self.outcomes += found
        say(f"requests: {', '.join(f'{what} {n}' for what, n in sorted(found.items()))}")

    def _class_of(self, one: Outcome, expected: str, moved: frozenset[str]) -> Class:
        if not one.problem and one.text == expected:
            return Class.MIGRATED if one.request_id in moved else Class.EQUAL
        if not one.problem or not expected.startswith(one.text):
            return Class.WRONG
        gone = [struck for struck in self.struck if _kills_door(struck.fault, self._name(one.door))]
        if any(one.began_s <= at.happened_s and at.began_s <= one.ended_s for at in gone):
            return Class.IN_FLIGHT
        accepted = bool(one.worker or one.text)
        down = any(at.began_s <= one.began_s <= at.served_s for at in gone)
        if down and not accepted and "Connection refused" in one.problem:
            return Class.DOOR_GONE
        if accepted or not one.problem.startswith(("503", "429")):
            return Class.LOST
        cut_off = any(
            at.fault.kind is Kind.CUT_FROM_ALL
            and at.fault.place == self._name(one.door)
            and at.began_s <= one.began_s <= at.over_s + LOST_AFTER_S
            for at in self.struck
        )
        return Class.CUT_OFF if cut_off else Class.REFUSED

    def _own_stall(self, one: Outcome) -> bool:
        """Whether the front door of a request was struck itself, so that its client waited."""
        name = self._name(one.door)
        return any(
            struck.fault.place == name
            and struck.began_s <= one.ended_s
            and one.began_s <= struck.over_s + LOST_AFTER_S
            for struck in self.struck
        )

    def _note_if_late(self, one: Outcome) -> None:
        """Who reaches the registry and the workers of other hosts stops sending to a lost one."""
        door = self._name(one.door)
        for struck in self.struck:
            fault = struck.fault
            after_s = LOST_AFTER_S + LOADED_S
            if fault.kind is Kind.CUT_FROM_ETCD:
                after_s = LEASE_S + 1.0 + LOADED_S
            elif not (
                fault.kind in _LOST or (fault.kind is Kind.CUT_FROM_DOOR and door == fault.other)
            ):
                continue
            here = door != fault.place and one.worker.startswith(f"{fault.place}-")
            if here and struck.began_s + after_s < one.began_s < struck.over_s:
                late_s = one.began_s - struck.began_s
                self.late.append(f"{one.worker} was chosen {late_s:.1f} s after: {fault}")

    def _name(self, address: str) -> str:
        return next(host.name for host in self.doors if host.address == address)

    def _migrated(self) -> frozenset[str]:
        """The ids of requests that front doors have moved."""
        logs = [self.demo.folder / name for name in ("h1-frontend.log", "h2-serve.log")]
        return frozenset(
            found for log in logs for found in _MIGRATED.findall(log.read_text(errors="replace"))
        )

    def tracebacks(self) -> int:
        """Errors that nobody expected, in the logs of the cluster."""
        logs = self.demo.folder.glob("h[123]-*.log")
        return sum(log.read_text(errors="replace").count("Traceback") for log in logs)

    def summary(self) -> None:
        """Print the figures of the run."""
        say(f"faults: {len(self.struck)}")
        for kind, number in sorted(Counter(one.fault.kind for one in self.struck).items()):
            say(f"  {number:3d} x {kind}")
        say(f"requests: {self.outcomes.total()}")
        for name in Class:
            say(f"  {self.outcomes[name]:5d} {name}")
        say(
            f"longest gap in a stream, its front door not struck itself: {self.longest_gap_s:.1f} s"
        )
        for times, what in {
            "views_s": "front doors' views differed from etcd",
            "indexes_s": "their indexes differed",
            "whole_s": "some workers were not ready",
        }.items():
            seconds = [getattr(one, times) for one in self.healings]
            if seconds:
                say(
                    f"{what} after faults for {statistics.median(seconds):.1f} s (median), at most "
                    f"{max(seconds):.1f} s, after the last one {seconds[-1]:.1f} s"
                )


def _equal(read: Callable[[], object], *others: Callable[[], object]) -> bool | None:
    """Whether several say the same; None if what they say changes while they are asked."""
    before = read()
    said = [other() for other in others]
    after = read()
    if all(one in (before, after) for one in said):
        return True
    return False if before == after else None


def _answers(door: Host) -> bool:
    return get(f"http://{door.address}:8000/live") is not None


def _overlapping(faults: Sequence[Fault]) -> list[Sequence[Fault]]:
    """Faults in groups that do not overlap."""
    groups: list[list[Fault]] = []
    ends_s = -1.0
    for fault in faults:
        if fault.at_s > ends_s:
            groups.append([])
        groups[-1].append(fault)
        ends_s = max(ends_s, fault.ends_s)
    return [*groups]


def _kills_door(fault: Fault, door: str) -> bool:
    kinds = (Kind.DOOR_KILLED, Kind.HOST_KILLED, Kind.HOST_VANISHED)
    return fault.kind in kinds and fault.place == door
