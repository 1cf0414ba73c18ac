"""What front doors report, and what a planner observes of it. Pure.

A report holds counts since its front door began, so reports may be lost: the next one makes up for
them. Each request arrives at one front door, and so counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, evolve, field, frozen

from commutator.contract.planner import Arrivals, SampleSums, length_bucket
from commutator.contract.tuning import ArmCounts
from commutator.contract.worker import Role


@define
class ArrivalCounts:
    """Counts the requests that arrive for a role, at times of one clock."""

    requests: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    lengths: Counter[int] = field(factory=Counter)
    gaps_squared_s2: float = 0.0
    last_s: float | None = None

    def came(self, now_s: float) -> None:
        if self.last_s is not None:
            self.gaps_squared_s2 += (now_s - self.last_s) ** 2
        self.last_s = now_s

    def count(self, uncached_tokens: int, context_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += uncached_tokens
        self.context_tokens += context_tokens
        self.lengths[length_bucket(uncached_tokens)] += 1

    def arrivals(self) -> Arrivals:
        return Arrivals(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            context_tokens=self.context_tokens,
            prompt_lengths=dict(self.lengths),
            gaps_squared_s2=self.gaps_squared_s2,
        )


@frozen(kw_only=True)
class DoorReport:
    """What one front door has counted since it began, and what it sees now."""

    door: str
    """Its name, with something random: a restarted front door is another one."""
    number: int
    """Of the report; counts from 1."""
    arrived: Mapping[Role, Arrivals] = field(factory=dict)
    """Since it began; on arrival: also requests that still wait."""
    answers: int = 0
    """Answers that ended."""
    answer_tokens: int = 0
    """Their tokens."""
    answers_in_time: int = 0
    """Of these, those whose mean time between tokens met the target."""
    first_tokens: int = 0
    """First tokens that came."""
    first_tokens_in_time: int = 0
    """Of these, those that came within the target."""
    waiting_tokens: Mapping[Role, int] = field(factory=dict)
    """Prompt tokens of the requests that wait for a worker, by role."""
    waiting_requests: int = 0
    """Requests that wait for a worker."""
    oldest_wait_s: float | None = None
    """How long the oldest of them has waited; None without one."""
    loads: Mapping[str, tuple[int, int]] = field(factory=dict)
    """Requests in flight from this front door at each worker, and the prompt tokens among them that
    are still to be computed."""
    cached_blocks: Mapping[str, int] = field(factory=dict)
    """KV blocks that each worker caches, as far as this front door knows."""
    measured: Mapping[Role, Mapping[int, SampleSums]] = field(factory=dict)
    """What ended requests tell of how fast workers are, by kind of stretch."""
    trial: int = 0
    """The number of the trial that this front door takes part in; 0: none."""
    arms: tuple[ArmCounts, ArmCounts] = (ArmCounts(), ArmCounts())
    """Its requests that began and ended in this trial, by the value before and the tried one; or
    since the last trial, all by the value before."""

    def pack(self) -> Any:
        """For a frame."""
        return msgspec.to_builtins(self)

    @classmethod
    def unpack(cls, packed: Any) -> DoorReport:
        """A report out of a frame. Raises ValueError for anything else."""
        return msgspec.convert(packed, cls)


@define
class _Door:
    counted: DoorReport
    """The report up to which everything has been observed."""
    newest: DoorReport
    heard_s: float


@frozen(kw_only=True)
class Reported:
    """What all front doors together report."""

    arrivals: Mapping[Role, Arrivals] | None
    """Since the last time that they were known; None where a front door is silent, or there is
    none."""
    output_tokens: float | None = None
    attained_ttft: float | None = None
    attained_itl: float | None = None
    waiting_tokens: Mapping[Role, int] = field(factory=dict)
    waiting_requests: int | None = None
    oldest_wait_s: float | None = None
    loads: Mapping[str, tuple[int, int]] = field(factory=dict)
    cached_blocks: Mapping[str, int] = field(factory=dict)
    measured: Mapping[Role, Mapping[int, SampleSums]] = field(factory=dict)
    arms: Mapping[int, tuple[ArmCounts, ArmCounts]] = field(factory=dict)
    """Requests that ended in each trial, by the value before and the tried one."""


class DoorReports:
    """The reports of all front doors.

    Times are seconds of one clock that does not go back. A front door that has been silent for
    ``silence_s`` makes the arrivals unknown, and after ``gone_s`` it is taken for gone.
    """

    def __init__(self, *, silence_s: float, gone_s: float) -> None:
        self._silence_s = silence_s
        self._gone_s = gone_s
        self._doors: dict[str, _Door] = {}
        self._left: list[_Door] = []
        """Doors that are gone, with what was not observed of them."""

    def take(self, report: DoorReport, now_s: float) -> None:
        """Take a report; one that is older than the last of its front door changes nothing.

        What a front door counted before its first report is not observed.
        """
        door = self._doors.get(report.door)
        if door is None:
            # It was taken for gone, or lost its connection, and nothing has been planned since.
            door = next((one for one in self._left if one.newest.door == report.door), None)
            if door is not None:
                self._left.remove(door)
                self._doors[report.door] = door
        if door is None:
            self._doors[report.door] = _Door(report, report, now_s)
        elif report.number > door.newest.number:
            door.newest, door.heard_s = report, now_s

    def leave(self, name: str) -> None:
        """A front door has said that it stops."""
        if (door := self._doors.pop(name, None)) is not None:
            self._left.append(door)

    @property
    def doors(self) -> int:
        """The front doors that report here."""
        return len(self._doors)

    def in_flight(self, worker_id: str) -> int:
        """Requests that the front doors have in flight at a worker."""
        return sum(door.newest.loads.get(worker_id, (0, 0))[0] for door in self._doors.values())

    def heard_since(self, time_s: float) -> bool:
        """Whether every front door has reported after ``time_s``."""
        return all(door.heard_s > time_s for door in self._doors.values())

    def observe(self, now_s: float) -> Reported:
        """What the front doors have counted since the last time that it was known."""
        for name, door in list(self._doors.items()):
            if now_s - door.heard_s > self._gone_s:
                self.leave(name)
        seen = _now([door.newest for door in self._doors.values()])
        silent = any(now_s - door.heard_s > self._silence_s for door in self._doors.values())
        if silent or not self._doors:
            return seen
        doors = [*self._doors.values(), *self._left]
        self._left = []
        seen = _counted(seen, doors)
        for door in doors:
            door.counted = door.newest
        return seen


def _now(reports: Sequence[DoorReport]) -> Reported:
    """What the front doors see now."""
    loads: dict[str, tuple[int, int]] = {}
    cached: dict[str, int] = {}
    waiting: Counter[Role] = Counter()
    for report in reports:
        waiting.update(report.waiting_tokens)
        for worker, (requests, tokens) in report.loads.items():
            before = loads.get(worker, (0, 0))
            loads[worker] = before[0] + requests, before[1] + tokens
        for worker, blocks in report.cached_blocks.items():
            cached[worker] = max(blocks, cached.get(worker, 0))
    waits = [one.oldest_wait_s for one in reports if one.oldest_wait_s is not None]
    return Reported(
        arrivals=None,
        waiting_tokens=waiting,
        waiting_requests=sum(one.waiting_requests for one in reports) if reports else None,
        oldest_wait_s=max(waits, default=None),
        loads=loads,
        cached_blocks=cached,
    )


def _counted(seen: Reported, doors: Sequence[_Door]) -> Reported:
    """``seen``, and what the front doors have counted since it was last observed."""

    def new(count: Callable[[DoorReport], int]) -> int:
        return sum(count(door.newest) - count(door.counted) for door in doors)

    answers, firsts = new(lambda one: one.answers), new(lambda one: one.first_tokens)
    arrived: dict[Role, list[Arrivals]] = {}
    arms: dict[int, tuple[ArmCounts, ArmCounts]] = {}
    for door in doors:
        before, tried = arms.get(door.newest.trial, (ArmCounts(), ArmCounts()))
        ended = _arms_since(door.newest, door.counted)
        arms[door.newest.trial] = before + ended[0], tried + ended[1]
        for role, counts in door.newest.arrived.items():
            known = door.counted.arrived.get(role, Arrivals())
            arrived.setdefault(role, []).append(_added(counts, known))

    def ratio(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    return evolve(
        seen,
        arrivals={role: _merged(counts) for role, counts in arrived.items()},
        output_tokens=ratio(new(lambda one: one.answer_tokens), answers),
        attained_ttft=ratio(new(lambda one: one.first_tokens_in_time), firsts),
        attained_itl=ratio(new(lambda one: one.answers_in_time), answers),
        measured=_measured(doors),
        arms=arms,
    )


def _measured(doors: Sequence[_Door]) -> Mapping[Role, Mapping[int, SampleSums]]:
    """What the front doors have measured since it was last observed."""
    measured: dict[Role, dict[int, SampleSums]] = {}
    for one in doors:
        for role, buckets in one.newest.measured.items():
            before = one.counted.measured.get(role, {})
            found = measured.setdefault(role, {})
            for bucket, sums in buckets.items():
                if (new := _since(sums, before.get(bucket))) is not None:
                    found[bucket] = found.get(bucket, SampleSums()) + new
    return measured


def _since(sums: SampleSums, before: SampleSums | None) -> SampleSums | None:
    """What was added; None: nothing."""
    if before is None:
        return sums
    return None if sums.count <= before.count else sums + before.times(-1)


def _arms_since(newest: DoorReport, counted: DoorReport) -> tuple[ArmCounts, ArmCounts]:
    """The requests of a trial that ended since; all of them if it is a new one."""
    if newest.trial != counted.trial:
        return newest.arms
    return newest.arms[0] - counted.arms[0], newest.arms[1] - counted.arms[1]


def _added(newest: Arrivals, before: Arrivals) -> Arrivals:
    lengths = Counter(newest.prompt_lengths)
    lengths.subtract(before.prompt_lengths)
    return Arrivals(
        requests=newest.requests - before.requests,
        prompt_tokens=newest.prompt_tokens - before.prompt_tokens,
        context_tokens=newest.context_tokens - before.context_tokens,
        prompt_lengths={tokens: number for tokens, number in lengths.items() if number},
        gaps_squared_s2=newest.gaps_squared_s2 - before.gaps_squared_s2,
    )


def _merged(counts: Sequence[Arrivals]) -> Arrivals:
    """The arrivals at all front doors, as if they had come to one."""
    lengths: Counter[int] = Counter()
    for one in counts:
        lengths.update(one.prompt_lengths)
    requests = sum(one.requests for one in counts)
    return Arrivals(
        requests=requests,
        prompt_tokens=sum(one.prompt_tokens for one in counts),
        context_tokens=sum(one.context_tokens for one in counts),
        prompt_lengths=dict(sorted(lengths.items())),
        gaps_squared_s2=_gaps_squared(counts, requests),
    )


def _gaps_squared(counts: Sequence[Arrivals], requests: int) -> float:
    """The squared gaps of the merged arrivals, as each front door knows those of its own only.

    The squared variation of merged independent arrivals is about the mean of theirs, weighted by
    rate; for n arrivals in a window w it is n * squares / w^2 - 1.
    """
    return sum(one.gaps_squared_s2 * (one.requests / requests) ** 2 for one in counts if requests)
