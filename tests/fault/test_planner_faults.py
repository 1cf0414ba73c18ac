"""What a planner promises when things around it fail, with real fleets, claims and front doors.

Engines and processes are fakes, and time is virtual: hours pass in a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import define, field
from tests.support.connections import Sent
from tests.support.planned_fleet import planner_of
from tests.support.supervised import FakeEngine, FakeProcess, IdleLauncher
from tests.support.virtual_time import in_virtual_time

from commutator.config.model import RuntimeConfig
from commutator.contract.engine import EngineClient, EngineConfig, ModelConfig
from commutator.contract.launcher import LaunchPlan
from commutator.contract.planner import PlannerBounds, WorkerPhase
from commutator.contract.registry import Change, Registry
from commutator.contract.request import RequestSummary
from commutator.contract.worker import EngineInfo, Role, WorkerRecord
from commutator.demand import DoorReports
from commutator.errors import EngineUnavailableError, RegistryError
from commutator.frontend.demand import DemandCounter
from commutator.registry.claims import PLANNER, Claim
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.fleet import Fleet
from commutator.supervisor.planner.loop import PlannerLoop, SteadyClock, Surroundings
from commutator.supervisor.planner.service import PlannerService
from commutator.supervisor.specs import WorkerSpec
from commutator.supervisor.worker_agent import WorkerAgent
from commutator_slo.config import SloConfig
from commutator_slo.need import Need, Situation

RUNTIME = RuntimeConfig(restart_backoff_s=1.0, restart_backoff_max_s=8.0, lease_s=15.0)
START_UP_S = 20.0
CONFIG = SloConfig(
    kind="test",
    interval_s=5.0,
    hold_s=120.0,  # longer than the minute over which demand is averaged
    start_up_s=START_UP_S,
    bounds=PlannerBounds(both=(1, 9)),
)


class OnePerRequest:
    """A worker for each request a second."""

    def __call__(self, situation: Situation) -> Mapping[Role, Need]:
        return {
            role: Need(workers=round(demand.requests_per_s), reason="one each")
            for role, demand in situation.demands.items()
        }


class Clock:
    """That of the machine, which the test makes jump."""

    jumped_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.jumped_s


class Engine(FakeEngine):
    """Each of its workers answers after ``START_UP_S``."""

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        return _Client()


class _Client(FakeEngine):
    def __init__(self) -> None:
        super().__init__(("engine",))
        self._ready_s = asyncio.get_running_loop().time() + START_UP_S

    async def start(self) -> EngineInfo:
        if asyncio.get_running_loop().time() < self._ready_s:
            raise EngineUnavailableError("it starts")
        return self.info

    async def close(self) -> None:
        pass


class Machines(IdleLauncher):
    """A launcher that works, fails or hangs."""

    def __init__(self) -> None:
        self.fails = self.hangs = False
        self.asked: list[str] = []
        self.running: dict[str, FakeProcess] = {}
        self._hanging = 0
        self.most_hanging = 0

    async def start(self, name: str, plan: LaunchPlan) -> FakeProcess:
        self.asked.append(name)
        if self.fails:
            raise OSError("no more machines")
        if self.hangs:
            self._hanging += 1
            self.most_hanging = max(self.most_hanging, self._hanging)
            try:
                await asyncio.Event().wait()
            finally:
                self._hanging -= 1
        process = self.running[name] = FakeProcess()
        return process


@define
class Cable(Registry):
    """The way of one supervisor to a shared registry, until it is cut."""

    registry: Registry
    is_cut: bool = False

    def _to(self) -> Registry:
        if self.is_cut:
            raise RegistryError("cut")
        return self.registry

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        return await self._to().register(record, ttl_s)

    async def keep_alive(self, lease_id: int) -> bool:
        return await self._to().keep_alive(lease_id)

    async def deregister(self, lease_id: int, reason: str) -> None:
        await self._to().deregister(lease_id, reason)

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return await self._to().set_draining(worker_id, draining)

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return await self._to().set_role(worker_id, role)

    async def watch(self) -> AsyncGenerator[Sequence[Change], None]:
        async for batch in self.registry.watch():
            if self.is_cut:
                await asyncio.Event().wait()
            yield batch

    async def close(self) -> None:
        pass


@define
class Door:
    """A front door's counts, told once a second to the planner that acts."""

    counter: DemandCounter
    name: str
    number: int = 0
    asked: float = 0.0

    def serve(self, requests: float) -> None:
        self.asked += requests
        while self.asked >= 1:
            self.asked -= 1
            request = RequestSummary(
                request_id="r", model="m", prompt_tokens=100, max_tokens=10, priority=0
            )
            self.counter.request_received(request)
            self.counter.placed(request, "w", uncached_tokens=100)

    def report(self) -> list[Any]:
        self.number += 1
        return ["planner", "report", self.counter.report(self.name, self.number).pack()]


class Host:
    """One supervisor: its fleet and its planner."""

    def __init__(self, name: str, registry: Registry, clock: Clock, folder: Path) -> None:
        self.cable = Cable(registry)
        self.machines = Machines()
        steady = SteadyClock(clock, most_s=2 * CONFIG.interval_s)
        self.reports = DoorReports(silence_s=5.0, gone_s=15.0)
        self.fleet = Fleet(
            self.cable,
            lambda spec: WorkerAgent(spec, RUNTIME, self.cable, self.machines, folder),
            steady,
            drain_timeout_s=30.0,
            in_flight=self.reports,
        )
        self.claim = Claim(PLANNER, f"{name}:1", self.cable, RUNTIME.lease_s, clock=clock)
        around = Surroundings(
            fleet=self.fleet,
            reports=self.reports,
            may_act=lambda: self.claim.held,
            clock=steady,
        )
        self.live = PlannerLoop(planner_of(CONFIG, OnePerRequest()), around)
        service = PlannerService(self.live)
        self.service = service.connected(Sent(lambda _: None)).on_frame
        spec = WorkerSpec(
            worker_id=f"{name}-w-0",
            config=EngineConfig(kind="fake", name="w"),
            model=ModelConfig(name="m", source="s"),
            connector=Engine(("engine",)),
        )
        self.fleet.begin([spec])
        works = (self.fleet.run(), self.live.run(), self.claim.run())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kill(self) -> None:
        """Its leases stay until they lapse."""
        self.cable.is_cut = True
        await self.stop()

    def count(self, *phases: WorkerPhase) -> int:
        """Workers of all hosts in these phases, as this one sees them."""
        return sum(one.phase in phases for one in self.fleet.workers() or ())

    def launched(self) -> int:
        return int(self.live.status()["actions"]["launch"])

    def acts(self) -> int:
        return sum(self.live.status()["actions"].values())


@define
class World:
    """Hosts that share a registry, front doors that report to the planner that acts, and load."""

    folder: Path
    clock: Clock
    registry: MemoryRegistry
    doors: list[Door]
    hosts: list[Host] = field(factory=list)
    silent: bool = False
    heard_by: Host | None = None
    """The one that front doors report to: it acts, or was the last one to."""
    most: int = 0
    """The most workers that were there or starting at a time."""
    fewest_ready: int = 99

    async def live(self, seconds: float, requests_per_s: float) -> None:
        """Pass time under load; requests come to the front doors in turn.

        Reports come halfway between the full seconds at which plans are made.
        """
        for second in range(round(seconds)):
            await asyncio.sleep(0.5)
            self.doors[second % len(self.doors)].serve(requests_per_s)
            acting = [host for host in self.hosts if host.claim.held]
            assert len(acting) <= 1
            for host in acting:
                before, self.heard_by = self.heard_by, host
                if before is not None and before is not host:
                    for door in self.doors:
                        before.service(["planner", "leave", door.name])
            if self.heard_by is not None and not self.silent:
                for door in self.doors:
                    self.heard_by.service(door.report())
            await asyncio.sleep(0.5)
            for host in acting:
                ready = host.count(WorkerPhase.READY)
                self.most = max(self.most, ready + host.count(WorkerPhase.STARTING))
                self.fewest_ready = min(self.fewest_ready, ready)

    def host(self, name: str) -> Host:
        self.hosts.append(Host(name, self.registry, self.clock, self.folder))
        return self.hosts[-1]


@asynccontextmanager
async def world(folder: Path, doors: int = 1) -> AsyncIterator[World]:
    clock = Clock()
    registry = MemoryRegistry(clock)
    counters = [DemandCounter(CONFIG, Role.BOTH, clock) for _ in range(doors)]
    found = [Door(counter, f"d{number}") for number, counter in enumerate(counters)]
    made = World(folder, clock, registry, found)
    try:
        yield made
    finally:
        for host in made.hosts:
            await host.stop()
        await registry.close()


@in_virtual_time
async def test_while_metrics_are_gone_the_fleet_stays_and_a_dead_worker_is_replaced(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as at:
        host = at.host("h")
        await at.live(200, 3.0)
        assert host.count(WorkerPhase.READY) == 3
        acts = host.acts()
        at.silent = True
        await at.live(400, 5.0)
        host.machines.running["h-w-0"].die()
        await at.live(10, 5.0)
        assert host.count(WorkerPhase.READY) == 2
        await at.live(100, 5.0)
        assert host.count(WorkerPhase.READY) == 3
        assert host.acts() == acts
        at.silent = False
        await at.live(120, 5.0)
        assert host.count(WorkerPhase.READY) == 5, "it follows the load again"


@in_virtual_time
async def test_while_the_launcher_fails_the_fleet_serves_on_and_grows_when_it_works_again(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as at:
        host = at.host("h")
        await at.live(60, 1.0)
        at.fewest_ready = 99
        host.machines.fails = True
        await at.live(400, 4.0)
        assert (at.fewest_ready, at.most) == (1, 4), "and it asks for no more than it needs"
        assert len(host.machines.asked) > 10, "it goes on trying"
        host.machines.fails = False
        await at.live(120, 4.0)
        assert host.count(WorkerPhase.READY) == 4
        assert at.most == 4


@in_virtual_time
async def test_while_the_launcher_hangs_no_launch_piles_up_and_planning_goes_on(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as at:
        host = at.host("h")
        await at.live(60, 1.0)
        at.fewest_ready = 99
        host.machines.hangs = True
        before = host.live.status()["plans"]
        await at.live(120, 4.0)
        assert host.live.status()["plans"] - before >= 120 / CONFIG.interval_s - 1
        assert (at.fewest_ready, at.most, host.machines.most_hanging) == (1, 4, 3)
        host.machines.hangs = False
        # A launch that hangs is given up after thrice the usual time, the next one later.
        await at.live(300, 4.0)
        assert host.count(WorkerPhase.READY) == 4
        assert at.most == 4


@in_virtual_time
async def test_when_the_planner_is_killed_another_takes_over_and_nothing_doubles(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as at:
        killed = at.host("a")
        await at.live(5, 0.0)
        heir = at.host("b")
        await at.live(60, 0.0)
        await at.live(200, 5.0)
        assert heir.launched() == 0
        assert heir.count(WorkerPhase.READY) == 5
        await killed.kill()
        at.hosts.remove(killed)
        await at.live(RUNTIME.lease_s * 3, 5.0)
        assert heir.claim.held
        await at.live(200, 5.0)
        assert heir.count(WorkerPhase.READY) == 5
        assert heir.launched() == 4, "those that died with the other supervisor"
        assert at.most == 5
        again = at.host("a")
        await at.live(300, 5.0)
        assert (again.launched(), heir.launched()) == (0, 4)
        assert heir.count(WorkerPhase.READY, WorkerPhase.STARTING) == 5, "one left for the new one"


@in_virtual_time
async def test_a_planner_that_acts_again_does_not_count_the_time_of_another(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        first = at.host("a")
        await at.live(5, 4.0)
        second = at.host("b")
        await at.live(200, 4.0)
        first.cable.is_cut = True
        await at.live(60, 4.0)
        assert second.claim.held
        first.cable.is_cut = False
        await second.kill()
        at.hosts.remove(second)
        await at.live(60, 4.0)
        assert first.claim.held
        windows = [seen.window_s for seen, _ in first.live.log.observed]
        assert max(windows) <= 2 * CONFIG.interval_s


@in_virtual_time
async def test_a_clock_that_jumps_starts_and_stops_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        host = at.host("h")
        await at.live(200, 3.0)
        acts = host.acts()
        for jump_s in (86_400.0, -3_600.0, 40.0):
            at.clock.jumped_s += jump_s
            await at.live(120, 3.0)
        assert host.count(WorkerPhase.READY) == 3
        assert host.acts() == acts
        processes = dict(host.machines.running)
        await at.live(1, 6.0)
        await at.live(60, 6.0)
        at.clock.jumped_s += 86_400.0  # while others start
        await at.live(120, 6.0)
        assert host.count(WorkerPhase.READY) == 6
        assert at.most == 6
        assert processes.items() <= host.machines.running.items()


@in_virtual_time
async def test_requests_at_two_front_doors_count_once(tmp_path: Path) -> None:
    async with world(tmp_path, doors=2) as at:
        host = at.host("h")
        await at.live(300, 4.0)
        seen = [seen for seen, _ in host.live.log.observed if seen.arrivals is not None][1:]
        counted = sum(one.arrivals[Role.BOTH].requests for one in seen if one.arrivals)
        passed_s = sum(one.window_s for one in seen)
        assert abs(counted - 4.0 * passed_s) <= 8
        assert host.count(WorkerPhase.READY) == 4
        assert at.most == 4
