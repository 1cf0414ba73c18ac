"""What to do next, from what should run and what runs. Pure: the same code is simulated in tests.

Workers of one model that serve alike are a *group*: whole requests and decode, or prefill. While a
group has workers that are not as wanted, new ones are started beside them, at most ``surge`` more
than are wanted, and an old one drains once a new one is ready. Where there is no room for one more,
because no device is free or ``surge`` is 0, old ones drain first, ``unavailable`` at a time.
Nothing is remembered between two calls, so a crash goes on from what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from attrs import field, frozen


class Phase(StrEnum):
    """What a worker does."""

    STARTING = "starting"
    """It is not in the registry: it starts for the first time, or again."""
    READY = "ready"
    HELD = "held"
    """It runs, and people have drained it."""
    DRAINING = "draining"
    """It finishes its requests and ends, or is being stopped."""


@frozen(kw_only=True)
class Want:
    """The workers that one engine entry should have."""

    engine: str
    group: str
    generation: str
    """Of its workers; others are obsolete."""
    replicas: int | None
    """None: somebody else says how many, such as a planner, and starts them."""
    device_sets: tuple[tuple[int, ...], ...] = ()
    """One for each worker at a time; empty: they own no devices."""


@frozen(kw_only=True)
class Worker:
    """A worker that runs, until its process has ended."""

    worker_id: str
    engine: str
    group: str
    generation: str
    phase: Phase
    devices: tuple[int, ...] = ()
    """Its own until it has ended."""


@frozen(kw_only=True)
class Rules:
    """How a roll proceeds."""

    surge: int = 1
    """Workers of a group above those wanted, while some are replaced."""
    unavailable: int = 1
    """Workers of a group that drain at the same time where there is no room for new ones."""
    may_interrupt: bool = False
    """Whether the last ready worker of a group may be one of them."""


@frozen
class Start:
    """Start a worker of an engine, on devices that nobody else has."""

    engine: str
    devices: tuple[int, ...] = ()


@frozen
class Drain:
    """Give a worker no more requests, and stop it when it has none left."""

    worker_id: str


@frozen
class Cancel:
    """Stop a worker that serves nobody."""

    worker_id: str


Step = Start | Drain | Cancel


@frozen
class Steps:
    """What to do now, and why more is not done."""

    now: Sequence[Step] = ()
    waits: Sequence[str] = ()
    """A line for people for each thing that only they can change."""
    settled: bool = False
    """Everything runs as wanted, and nothing else does."""


def steps(wants: Sequence[Want], workers: Sequence[Worker], rules: Rules = Rules()) -> Steps:
    """The next steps of all groups."""
    wanted = {want.engine: want for want in wants}
    obsolete = {
        one.worker_id
        for one in workers
        if (want := wanted.get(one.engine)) is None
        or (want.generation, want.group) != (one.generation, one.group)
    }
    groups = dict.fromkeys([*(one.group for one in wants), *(one.group for one in workers)])
    made = [
        _Group(
            [want for want in wants if want.group == name],
            [one for one in workers if one.group == name],
            obsolete,
            rules,
        )
        for name in groups
    ]
    devices = _Devices(workers, obsolete)
    for group in made:
        group.decide(devices)
    return Steps(
        [step for group in made for step in group.now],
        [line for group in made for line in group.waits],
        all(group.settled for group in made),
    )


class _Devices:
    """Which devices are taken, for workers of an engine.

    Two entries that both name a device share it by choice; what an obsolete worker has is its own.
    """

    def __init__(self, workers: Iterable[Worker], obsolete: set[str]) -> None:
        self._of_engine: dict[str, set[int]] = {}
        self._obsolete: set[int] = set()
        for one in workers:
            self._of_engine.setdefault(one.engine, set()).update(one.devices)
            if one.worker_id in obsolete:
                self._obsolete.update(one.devices)

    def take(self, want: Want) -> tuple[int, ...] | None:
        """A free set for one more worker; empty where it needs none; None: none is free."""
        if not want.device_sets:
            return ()
        taken = self._of_engine.setdefault(want.engine, set())
        both = taken | self._obsolete
        found = next((one for one in want.device_sets if both.isdisjoint(one)), None)
        if found is not None:
            taken.update(found)
        return found


@frozen(eq=False)
class _Group:
    wants: Sequence[Want]
    workers: Sequence[Worker]
    all_obsolete: set[str]
    rules: Rules
    now: list[Step] = field(factory=list)
    waits: list[str] = field(factory=list)

    @property
    def alive(self) -> list[Worker]:
        return [one for one in self.workers if one.phase is not Phase.DRAINING]

    @property
    def obsolete(self) -> list[Worker]:
        return [one for one in self.alive if one.worker_id in self.all_obsolete]

    def current(self, want: Want) -> list[Worker]:
        return [
            one
            for one in self.alive
            if one.engine == want.engine and one.worker_id not in self.all_obsolete
        ]

    @property
    def target(self) -> int:
        """How many workers the group should have."""
        return sum(
            len(self.current(want)) + self._replaced_for(want)
            if want.replicas is None
            else want.replicas
            for want in self.wants
        )

    def _replaced_for(self, want: Want) -> int:
        return sum(one.engine == want.engine for one in self.obsolete)

    @property
    def settled(self) -> bool:
        enough = all(
            want.replicas is None
            or sum(one.phase is not Phase.STARTING for one in self.current(want)) == want.replicas
            for want in self.wants
        )
        rests = not self.now and len(self.alive) == len(self.workers)
        return enough and rests and not self.obsolete

    def decide(self, devices: _Devices) -> None:
        no_room = self._start(devices)
        ready = self._stop_idle()
        surplus = [one for want in self.wants for one in self._surplus(want)]
        leaving = [one for one in (*surplus, *self.obsolete) if one.phase is Phase.READY]
        for one in leaving:
            if ready > self.target:
                self.now.append(Drain(one.worker_id))
                ready -= 1
        if no_room or any(want.replicas is None for want in self.wants):
            self._drain_first(ready)

    def _start(self, devices: _Devices) -> bool:
        """Start what is missing; returns whether there was no room for some of it."""
        room = self.target + self.rules.surge - len(self.alive)
        no_room = False
        for want in self.wants:
            for _ in range((want.replicas or 0) - len(self.current(want))):
                if self.obsolete and room <= 0:
                    no_room |= not self.rules.surge
                    break
                found = devices.take(want)
                if found is None:
                    no_room = True
                    if not self.obsolete and len(self.alive) == len(self.workers):
                        self.waits.append(f"no device of engine {want.engine} is free")
                    break
                self.now.append(Start(want.engine, found))
                room -= 1
        return no_room

    def _surplus(self, want: Want) -> list[Worker]:
        """Workers beyond the number that is wanted, those that serve nobody first."""
        current = self.current(want)
        if want.replicas is None or len(current) <= want.replicas:
            return []
        order = (Phase.STARTING, Phase.HELD, Phase.READY)
        latest_first = current[::-1]
        by_use = sorted(latest_first, key=lambda one: order.index(one.phase))
        return by_use[: len(current) - want.replicas]

    def _stop_idle(self) -> int:
        """Stop what serves nobody and is not wanted; returns how many workers are ready."""
        for one in (*(one for want in self.wants for one in self._surplus(want)), *self.obsolete):
            if one.phase in (Phase.STARTING, Phase.HELD):
                self.now.append(Cancel(one.worker_id))
        return sum(one.phase is Phase.READY for one in self.alive)

    def _drain_first(self, ready: int) -> None:
        """Make room: nothing starts or drains in the group at that time."""
        if self.now or any(one.phase in (Phase.STARTING, Phase.DRAINING) for one in self.workers):
            return
        least = min(self.target, len(self.alive)) - self.rules.unavailable
        most = max(1, self.rules.unavailable)
        candidates = [one for one in self.obsolete if one.phase is Phase.READY]
        for one in candidates[:most]:
            if ready - 1 < least:
                return
            if ready == 1 and not self.rules.may_interrupt:
                self.waits.append(
                    f"{one.worker_id} is the last ready worker of {one.group}, and there is no "
                    "room for another beside it: free a device, or set may_interrupt in the entry "
                    "of `operations` of kind rollout"
                )
                return
            self.now.append(Drain(one.worker_id))
            ready -= 1
