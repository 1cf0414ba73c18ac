"""Random changes and faults, over the pure steps: every sequence ends in what was accepted last.

The simulation does what a fleet does: workers start and fail, drain for a while, die and start
again; people drain some; the supervisor dies with everything, and goes on from what runs. On the
way a group never has fewer ready workers than the rules allow, and no device has two owners.
"""

from __future__ import annotations

import random
from typing import Any

from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator_rollout.steps import Cancel, Drain, Phase, Rules, Start, Want, Worker, steps

MODELS = ("m", "other")
ENGINES = ("a", "b", "c")


@st.composite
def documents(draw: st.DrawFn) -> tuple[Want, ...]:
    """Some engines of one or two models. Those with devices share six of them."""
    wants = []
    left = list(range(6))
    for engine in draw(st.lists(st.sampled_from(ENGINES), unique=True, max_size=3)):
        replicas = draw(st.integers(1, 5))
        sets: tuple[tuple[int, ...], ...] = ()
        if draw(st.booleans()) and left:
            each = draw(st.integers(1, 2))
            replicas = min(replicas, len(left) // each)
            if not replicas:
                continue
            own, left = left[: each * replicas], left[each * replicas :]
            sets = tuple(tuple(own[i : i + each]) for i in range(0, len(own), each))
        generation = f"{draw(st.integers(1, 3))}/{sets}"  # it follows from the list, too
        model = draw(st.sampled_from(MODELS))
        wants.append(
            Want(
                engine=engine,
                group=model,
                generation=generation,
                replicas=replicas,
                device_sets=sets,
            )
        )
    return tuple(wants)


RULES = st.builds(Rules, surge=st.integers(0, 2), unavailable=st.integers(1, 2))
EVENTS = st.one_of(
    st.tuples(st.just("document"), documents()),
    st.tuples(st.sampled_from(["crash", "worker dies", "hold", "release", "slow"]), st.integers()),
    st.tuples(st.just("time"), st.integers(1, 6)),
)


@define
class Fleet:
    """Workers by id, each with the ticks that its phase still takes."""

    rng: random.Random
    workers: dict[str, tuple[Worker, int]] = field(factory=dict)
    numbers: int = 0
    slow: bool = False

    def all(self) -> list[Worker]:
        return [worker for worker, _ in self.workers.values()]

    def do(self, step: Any, wants: tuple[Want, ...]) -> None:
        match step:
            case Start(engine, devices):
                (want,) = (one for one in wants if one.engine == engine)
                name = f"{engine}-{self.numbers}"
                self.numbers += 1
                worker = Worker(
                    worker_id=name,
                    engine=engine,
                    group=want.group,
                    generation=want.generation,
                    phase=Phase.STARTING,
                    devices=devices,
                )
                self.workers[name] = worker, self.rng.randint(1, 9 if self.slow else 4)
            case Drain(name):
                worker, _ = self.workers[name]
                assert worker.phase is Phase.READY
                self.workers[name] = evolve(worker, phase=Phase.DRAINING), self.rng.randint(1, 5)
            case Cancel(name):
                worker, _ = self.workers[name]
                assert worker.phase in (Phase.STARTING, Phase.HELD)
                self.workers[name] = evolve(worker, phase=Phase.DRAINING), 1

    def tick(self) -> None:
        for name, (worker, left) in list(self.workers.items()):
            if left > 1:
                self.workers[name] = worker, left - 1
            elif worker.phase is Phase.DRAINING:
                del self.workers[name]
            elif worker.phase is Phase.STARTING:
                self.workers[name] = evolve(worker, phase=Phase.READY), 0

    def change_one(self, phase: Phase, new: Phase, number: int) -> None:
        found = sorted(name for name, (one, _) in self.workers.items() if one.phase is phase)
        if found:
            name = found[number % len(found)]
            self.workers[name] = evolve(self.workers[name][0], phase=new), 3

    def suffer(self, fault: str, number: int) -> None:
        match fault:
            case "crash":  # the guard ends all that the supervisor started
                self.workers.clear()
            case "worker dies":
                self.change_one(Phase.READY, Phase.STARTING, number)
            case "hold":
                self.change_one(Phase.READY, Phase.HELD, number)
            case "release":
                self.change_one(Phase.HELD, Phase.READY, number)
            case "slow":
                self.slow = not self.slow

    def ready(self, group: str) -> int:
        return sum(one.group == group and one.phase is Phase.READY for one in self.all())


def no_device_has_two_owners(fleet: Fleet) -> None:
    taken = [device for one in fleet.all() for device in one.devices]
    assert len(taken) == len(set(taken)), fleet.all()


def advance(fleet: Fleet, wants: tuple[Want, ...], rules: Rules) -> bool:
    """One look; returns whether everything is as wanted."""
    before = {group: fleet.ready(group) for group in MODELS}
    present = {
        group: sum(one.group == group and one.phase is not Phase.DRAINING for one in fleet.all())
        for group in MODELS
    }
    found = steps(wants, fleet.all(), rules)
    for step in found.now:
        fleet.do(step, wants)
    for group in MODELS:
        target = sum(want.replicas or 0 for want in wants if want.group == group)
        least = min(before[group], target, present[group]) - rules.unavailable
        assert fleet.ready(group) >= least, (found, fleet.all())
        if target and before[group]:
            assert fleet.ready(group), "the last ready worker was drained"
    no_device_has_two_owners(fleet)
    return found.settled


@settings(max_examples=500, deadline=None)
@given(
    first=documents(),
    events=st.lists(EVENTS, max_size=14),
    rules=RULES,
    seed=st.integers(0, 2**32),
)
def test_every_sequence_ends_in_the_last_document(
    first: tuple[Want, ...], events: list[tuple[str, Any]], rules: Rules, seed: int
) -> None:
    fleet, wants = Fleet(random.Random(seed)), first
    for kind, value in events:
        if kind == "document":
            wants = value
        for _ in range(value if kind == "time" else 0):
            advance(fleet, wants, rules)
            fleet.tick()
        fleet.suffer(kind, value)
        advance(fleet, wants, rules)
        fleet.tick()
    for one in [name for name, (worker, _) in fleet.workers.items() if worker.phase is Phase.HELD]:
        fleet.workers[one] = evolve(fleet.workers[one][0], phase=Phase.READY), 0
    may = evolve(rules, may_interrupt=True)  # else people have to make room for a last worker
    for _ in range(400):
        if advance_freely(fleet, wants, may):
            break
        fleet.tick()
    else:
        raise AssertionError((wants, fleet.all(), steps(wants, fleet.all(), may)))
    found = {(one.engine, one.generation) for one in fleet.all()}
    assert found == {(want.engine, want.generation) for want in wants}
    for want in wants:
        assert sum(one.engine == want.engine for one in fleet.all()) == want.replicas


def advance_freely(fleet: Fleet, wants: tuple[Want, ...], rules: Rules) -> bool:
    found = steps(wants, fleet.all(), rules)
    for step in found.now:
        fleet.do(step, wants)
    no_device_has_two_owners(fleet)
    return found.settled


@settings(max_examples=200, deadline=None)
@given(first=documents(), second=documents(), surge=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_without_devices_a_change_never_lowers_what_is_ready(
    first: tuple[Want, ...], second: tuple[Want, ...], surge: int, seed: int
) -> None:
    """There is room for new workers beside the old ones, so those are ready first."""
    rules = Rules(surge=surge)
    first, second = (tuple(evolve(w, device_sets=()) for w in wants) for wants in (first, second))
    fleet = Fleet(random.Random(seed))
    for wants in (first, second):
        before = {group: fleet.ready(group) for group in MODELS}
        for _ in range(200):
            settled = advance_freely(fleet, wants, rules)
            for group in MODELS:
                target = sum(want.replicas or 0 for want in wants if want.group == group)
                assert fleet.ready(group) >= min(before[group], target)
            if settled:
                break
            fleet.tick()
        else:
            raise AssertionError(fleet.all())
