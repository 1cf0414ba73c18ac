"""The live planner plans as the replayed one does; faults neither double nor lose workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import define, evolve, field
from tests.support.connections import Sent
from tests.support.planned_fleet import planner_of

from commutator.contract.planner import (
    Arrivals,
    PlannedWorker,
    PlannerBounds,
    WorkerPhase,
    length_bucket,
)
from commutator.contract.registry import Registry
from commutator.contract.worker import Role
from commutator.demand import DoorReport, DoorReports
from commutator.planning import ActionKind
from commutator.registry.claims import PLANNER, Claim
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.fleet import ActionResult
from commutator.supervisor.planner.loop import PlannerLoop, SteadyClock, Surroundings
from commutator.supervisor.planner.service import PlannerService
from commutator_slo.config import SloConfig
from commutator_slo.need import Need, Situation

CONFIG = SloConfig(
    kind="test", interval_s=5.0, hold_s=0.0, start_up_s=20.0, bounds=PlannerBounds(both=(1, 9))
)


class OnePerRequest:
    """A worker for each request a second."""

    def __call__(self, situation: Situation) -> Mapping[Role, Need]:
        return {
            role: Need(workers=round(demand.requests_per_s), reason="one each")
            for role, demand in situation.demands.items()
        }


@define
class World:
    """Time, front doors and workers without processes."""

    now_s: float = 0.0
    workers: dict[str, PlannedWorker] = field(factory=dict)
    acts: list[str] = field(factory=list)
    fails: bool = False
    hangs: bool = False
    started_s: list[float] = field(factory=list)
    requests: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def add(self, name: str, phase: WorkerPhase, age_s: float = 100.0, **more: Any) -> None:
        self.workers[name] = PlannedWorker(
            worker_id=name, role=Role.BOTH, phase=phase, age_s=age_s, **more
        )

    def pass_time(self, seconds: float, start_up_s: float = 20.0) -> None:
        self.now_s += seconds
        for name, before in self.workers.items():
            one = evolve(before, age_s=before.age_s + seconds)
            if one.phase is WorkerPhase.STARTING and one.age_s >= start_up_s and not self.hangs:
                self.workers[name] = evolve(one, phase=WorkerPhase.READY)
                self.started_s.append(start_up_s)
            else:
                self.workers[name] = one

    def supply(self) -> int:
        return sum(one.phase is not WorkerPhase.DRAINING for one in self.workers.values())


@define
class WorldFleet:
    """What a supervisor's fleet does, at once."""

    world: World

    def workers(self) -> Sequence[PlannedWorker]:
        return list(self.world.workers.values())

    def take_start_ups(self) -> Sequence[float]:
        started, self.world.started_s = self.world.started_s, []
        return started

    def launch(self, role: Role) -> ActionResult:
        if self.world.fails:
            raise OSError("no more machines")
        name = f"new-{len(self.world.acts)}"
        self.world.acts.append(f"launch {name}")
        self.world.add(name, WorkerPhase.STARTING, 0.0)
        return ActionResult(True, f"{name} starts")

    def cancel(self, worker_id: str) -> ActionResult:
        del self.world.workers[worker_id]
        self.world.acts.append(f"cancel {worker_id}")
        return ActionResult(True, "cancelled")

    def drain(self, worker_id: str) -> ActionResult:
        one = self.world.workers[worker_id]
        self.world.workers[worker_id] = evolve(one, phase=WorkerPhase.DRAINING)
        self.world.acts.append(f"drain {worker_id}")
        return ActionResult(True, "drains")

    def undrain(self, worker_id: str) -> ActionResult:
        one = self.world.workers[worker_id]
        self.world.workers[worker_id] = evolve(one, phase=WorkerPhase.READY)
        self.world.acts.append(f"undrain {worker_id}")
        return ActionResult(True, "back")

    def set_role(self, worker_id: str, role: Role) -> ActionResult:
        self.world.workers[worker_id] = evolve(self.world.workers[worker_id], role=role)
        self.world.acts.append(f"set_role {worker_id} {role}")
        return ActionResult(True, "changes")


class Rig:
    def __init__(
        self,
        world: World,
        doors: int = 1,
        claim: Claim | None = None,
        config: SloConfig = CONFIG,
    ) -> None:
        self.world = world
        self.reports = DoorReports(silence_s=8.0, gone_s=20.0)
        self.planner = planner_of(config, OnePerRequest())
        around = Surroundings(
            fleet=WorldFleet(world),
            reports=self.reports,
            may_act=(lambda: True) if claim is None else (lambda: claim.held),
            clock=world.clock,
            unix_clock=lambda: 1000.0 + world.now_s,
        )
        self.live = PlannerLoop(self.planner, around)
        self.doors = doors
        self.number = 0

    def tick(self, rate_per_s: float | None, seconds: float = 5.0) -> None:
        """Pass an interval with requests, or with silent front doors, and plan."""
        self.world.pass_time(seconds)
        if rate_per_s is not None:
            self.world.requests += rate_per_s * seconds
            self.tell()
        self.live.tick()

    def tell(self) -> None:
        self.number += 1
        for door in range(self.doors):
            mine = round(self.world.requests / self.doors)
            counts = Arrivals(
                requests=mine,
                prompt_tokens=mine * 100,
                context_tokens=mine * 100,
                prompt_lengths={length_bucket(100): mine},
            )
            self.live.report(
                DoorReport(door=f"d{door}", number=self.number, arrived={Role.BOTH: counts})
            )


def ready(*names: str) -> World:
    world = World()
    for name in names:
        world.add(name, WorkerPhase.READY)
    return world


@pytest.mark.parametrize("doors", [1, 2])
def test_requests_at_one_or_two_front_doors_make_the_same_fleet(doors: int) -> None:
    rig = Rig(ready("w-0"), doors)
    for _ in range(30):
        rig.tick(4.0)
    assert rig.world.supply() == 4
    assert len(rig.world.acts) == 3


def test_live_and_replayed_plans_are_equal_for_equal_observations() -> None:
    rig = Rig(ready("w-0", "w-1"))
    for rate in [1.0] * 20 + [6.0] * 30 + [None] * 4 + [2.0] * 60:
        rig.tick(rate)
    assert len({plan.roles[Role.BOTH].desired for _, plan in rig.live.log.observed}) > 3
    state = rig.planner.begin()
    for seen, plan in rig.live.log.observed:
        state, again = rig.planner.plan(state, seen)
        assert again == plan


def test_with_metrics_gone_the_fleet_stays_as_it_is() -> None:
    rig = Rig(ready("w-0"))
    for _ in range(20):
        rig.tick(3.0)
    acts = list(rig.world.acts)
    for _ in range(100):
        rig.tick(None)
    assert rig.world.acts == acts
    assert rig.world.supply() == 3
    assert "not known" in rig.live.log.history()[-1]["text"]


def test_a_launcher_that_fails_is_asked_again_and_the_planner_goes_on() -> None:
    rig = Rig(ready("w-0"))
    rig.world.fails = True
    for _ in range(20):
        rig.tick(3.0)
    assert rig.world.supply() == 1
    explained = rig.live.log.explain()
    assert explained is not None
    assert {one["outcome"] for one in explained["actions"]} == {"failed: no more machines"}
    rig.world.fails = False
    rig.tick(3.0)
    assert rig.world.supply() == 3


def test_a_launch_that_never_comes_is_replaced_and_never_piles_up() -> None:
    rig = Rig(ready("w-0"))
    rig.world.hangs = True
    most = 0
    for _ in range(200):
        rig.tick(3.0)
        most = max(most, len(rig.world.workers))
    assert most == 3, "two are launched at a time, whatever becomes of them"
    assert any(act.startswith("cancel") for act in rig.world.acts)


async def test_when_the_planner_is_killed_another_takes_over_and_nothing_doubles() -> None:
    world = ready("w-0")
    registry: Registry = MemoryRegistry(clock=world.clock)
    first, second = (Claim(PLANNER, f"h:{n}", registry, 15.0, clock=world.clock) for n in range(2))
    await first.renew()
    killed, heir = Rig(world, claim=first), Rig(world, claim=second)
    for _ in range(14):
        world.pass_time(5.0)
        world.requests += 15.0
        for rig in (killed, heir):
            rig.tell()
            rig.live.tick()
        await first.renew()
    assert world.supply() == 3
    assert heir.live.log.observed == killed.live.log.observed.__class__(), "it only watched"
    before = len(world.acts)
    for number in range(40):  # the first one is dead: it neither renews nor plans
        world.pass_time(5.0)
        world.requests += 25.0 if number > 10 else 15.0
        heir.tell()
        heir.live.tick()
        if not second.held and number < 3:
            continue
        await second.renew()
    assert world.supply() == 5
    assert world.acts[before:] == [f"launch new-{before}", f"launch new-{before + 1}"]
    await registry.close()


async def test_two_planners_at_once_act_as_one() -> None:
    world = ready("w-0")
    registry: Registry = MemoryRegistry(clock=world.clock)
    claims = [Claim(PLANNER, f"h:{n}", registry, 15.0, clock=world.clock) for n in range(2)]
    await claims[0].renew()
    rigs = [Rig(world, claim=claim) for claim in claims]
    for _ in range(30):
        world.pass_time(5.0)
        world.requests += 20.0
        for rig in rigs:
            rig.tell()
            rig.live.tick()
        await claims[0].renew()
    assert len(world.acts) == 3
    await registry.close()


def test_a_clock_that_jumps_neither_stops_nor_starts_workers() -> None:
    raw_s = 0.0
    clock = SteadyClock(lambda: raw_s, most_s=30.0)
    raw_s = 10.0
    assert clock() == 10.0
    raw_s = 5.0
    assert clock() == 10.0
    raw_s = 100_000.0
    assert clock() == 40.0
    raw_s = 100_005.0
    assert clock() == 45.0
    rig = Rig(ready("w-0"))
    for _ in range(20):
        rig.tick(3.0)
    acts = list(rig.world.acts)
    rig.world.now_s -= 3.0  # of a clock that is not steady
    rig.live.tick()
    assert rig.world.acts == acts


def test_advice_changes_nothing() -> None:
    rig = Rig(ready("w-0"), config=evolve(CONFIG, mode="advise"))
    for _ in range(30):
        rig.tick(3.0)
    assert rig.world.acts == []
    explained = rig.live.log.explain()
    assert explained is not None
    assert explained["roles"]["both"]["desired"] == 3
    assert {one["outcome"] for one in explained["actions"]} == {"only advised"}


def test_held_workers_count_and_are_not_chosen() -> None:
    world = ready("w-0")
    world.add("of-people", WorkerPhase.READY, held=True)
    world.add("drained-by-people", WorkerPhase.DRAINING, held=True)
    rig = Rig(world)
    for _ in range(30):
        rig.tick(3.0)
    assert [act.split()[0] for act in world.acts] == ["launch"], "2 are there, 1 is launched"
    for _ in range(60):
        rig.tick(1.0)
    assert world.workers["of-people"].phase is WorkerPhase.READY
    assert sum(one.phase is WorkerPhase.READY for one in world.workers.values()) == 1


async def test_a_request_that_waits_without_a_worker_is_planned_for_at_once() -> None:
    world = World()
    rig = Rig(world, config=evolve(CONFIG, bounds=PlannerBounds(both=(0, 9)), interval_s=3600.0))
    rig.live.tick()
    assert world.acts == []
    running = asyncio.create_task(rig.live.run())
    await asyncio.sleep(0)
    world.now_s += 1.0
    rig.live.report(
        DoorReport(door="d0", number=1, waiting_requests=1, waiting_tokens={Role.BOTH: 10})
    )
    async with asyncio.timeout(10):
        while not world.acts:
            await asyncio.sleep(0.01)
    running.cancel()
    assert world.acts == ["launch new-0"]


def test_people_are_told_what_was_done_and_why() -> None:
    rig = Rig(ready("w-0"))
    for _ in range(10):
        rig.tick(1.0)
    for _ in range(20):
        rig.tick(4.0)
    texts = [one["text"] for one in rig.live.log.history()]
    assert any("need 4 (one each)" in text and "starts" in text for text in texts)
    before = rig.live.log.explain(1000.0 + 50.0)
    assert before is not None
    assert before["time"] == 1050.0
    assert rig.live.log.explain(1000.0) is None
    status = rig.live.status()
    assert status["actions"][ActionKind.LAUNCH] == 3
    sent: list[list[Any]] = []
    on_frame = PlannerService(rig.live).connected(Sent(sent.append)).on_frame
    on_frame(["planner", "ask", 7, "explain", 1050.0])
    on_frame(["planner", "report", DoorReport(door="x", number=1).pack()])
    on_frame(["planner", "leave", "x"])
    assert sent[0] == ["planner", "answer", 7, before]
    assert sent[1][:2] == ["planner", "status"]
    with pytest.raises(ValueError, match="unknown"):
        on_frame(["planner", "ask", 1, "secret", None])
