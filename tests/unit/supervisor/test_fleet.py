"""A fleet launches, drains and stops workers without ever making its planner wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.supervised import FakeEngine, FakeLauncher, FakeProcess

from commutator.config.model import RuntimeConfig
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.launcher import LaunchPlan
from commutator.contract.planner import PlannedWorker, WorkerPhase
from commutator.contract.worker import EngineLoad, Role
from commutator.errors import ConfigError
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.fleet import Fleet
from commutator.supervisor.worker_agent import WorkerAgent, WorkerSpec

RUNTIME = RuntimeConfig(restart_backoff_s=0.01, lease_s=30.0)
BUSY = EngineLoad(running=1)


class Engine(FakeEngine):
    """Tells the load that the test sets."""

    def __init__(self) -> None:
        super().__init__(("engine",))
        self.now = EngineLoad()

    async def load(self) -> EngineLoad:
        return self.now

    async def close(self) -> None:
        pass


class Doors:
    """What the front doors have in flight."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.heard = True

    def in_flight(self, worker_id: str) -> int:
        return self.requests.get(worker_id, 0)

    def heard_since(self, time_s: float) -> bool:
        return self.heard


class Rig:
    def __init__(self, folder: Path, drain_timeout_s: float, launcher: FakeLauncher) -> None:
        self.registry = MemoryRegistry()
        self.engine, self.launcher, self.doors = Engine(), launcher, Doors()
        self.fleet = Fleet(
            self.registry,
            lambda spec: WorkerAgent(spec, RUNTIME, self.registry, launcher, folder),
            time.monotonic,
            drain_timeout_s=drain_timeout_s,
            in_flight=self.doors,
            poll_s=0.02,
        )

    def spec(self, number: int) -> WorkerSpec:
        return WorkerSpec(
            worker_id=f"w-{number}",
            config=EngineConfig(kind="fake", name="w"),
            model=ModelConfig(name="m", source="s"),
            connector=self.engine,
        )

    def seen(self, name: str) -> PlannedWorker | None:
        return next((o for o in self.fleet.workers() or () if o.worker_id == name), None)

    def phase(self, name: str) -> WorkerPhase | None:
        one = self.seen(name)
        return None if one is None else one.phase

    async def until(self, name: str, phase: WorkerPhase | None) -> None:
        await until(lambda: self.phase(name) is phase)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    folder: Path,
    workers: int = 1,
    drain_timeout_s: float = 600.0,
    launcher: FakeLauncher | None = None,
) -> AsyncIterator[Rig]:
    rig = Rig(folder, drain_timeout_s, launcher or FakeLauncher())
    rig.fleet.begin([rig.spec(number) for number in range(workers)])
    task = asyncio.create_task(rig.fleet.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.registry.close()


async def test_a_launched_worker_becomes_ready_and_its_start_up_is_measured(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        rig.fleet.take_start_ups()
        assert rig.fleet.launch(Role.BOTH).text == "w-1 starts"
        assert rig.phase("w-1") is WorkerPhase.STARTING
        await rig.until("w-1", WorkerPhase.READY)
        (took_s,) = rig.fleet.take_start_ups()
        assert took_s >= 0
        assert rig.fleet.take_start_ups() == []


async def test_a_drained_worker_is_stopped_when_its_last_request_has_ended(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as rig:
        await rig.until("w-1", WorkerPhase.READY)
        rig.engine.now = BUSY
        rig.doors.requests["w-1"] = 1
        assert rig.fleet.drain("w-1").done
        assert not rig.fleet.drain("w-1").done, "once"
        assert rig.phase("w-1") is WorkerPhase.DRAINING
        await asyncio.sleep(0.2)
        assert rig.phase("w-1") is WorkerPhase.DRAINING
        rig.doors.requests.clear()
        await asyncio.sleep(0.2)
        assert rig.phase("w-1") is WorkerPhase.DRAINING, "the engine still has one"
        rig.engine.now = EngineLoad()
        await rig.until("w-1", None)
        await until(lambda: rig.launcher.processes[1].stopped)
        # Its name is free again, and the next worker of that name is not drained.
        assert rig.fleet.launch(Role.BOTH).text == "w-1 starts"
        await rig.until("w-1", WorkerPhase.READY)


async def test_a_drain_that_takes_too_long_ends_with_a_stop(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, drain_timeout_s=0.3) as rig:
        await rig.until("w-1", WorkerPhase.READY)
        rig.engine.now = BUSY
        rig.fleet.drain("w-1")
        await rig.until("w-1", None)
        assert rig.phase("w-0") is WorkerPhase.READY


async def test_without_word_of_the_front_doors_no_drained_worker_is_stopped(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=2) as rig:
        await rig.until("w-1", WorkerPhase.READY)
        rig.doors.heard = False
        rig.fleet.drain("w-1")
        await asyncio.sleep(0.2)
        assert rig.phase("w-1") is WorkerPhase.DRAINING
        assert rig.fleet.undrain("w-1").done
        await rig.until("w-1", WorkerPhase.READY)
        rig.doors.heard = True
        await asyncio.sleep(0.2)
        assert rig.phase("w-1") is WorkerPhase.READY


async def test_a_worker_that_people_drain_is_theirs_until_they_release_it(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        await rig.registry.set_draining("w-0", True)
        await rig.until("w-0", WorkerPhase.DRAINING)
        seen = rig.seen("w-0")
        assert seen is not None
        assert seen.held
        await asyncio.sleep(0.2)
        assert rig.phase("w-0") is WorkerPhase.DRAINING, "idle, and not stopped"
        await rig.registry.set_draining("w-0", False)
        await rig.until("w-0", WorkerPhase.READY)
        seen = rig.seen("w-0")
        assert seen is not None
        assert not seen.held


async def test_a_worker_that_people_bring_back_from_a_plans_drain_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        rig.engine.now = BUSY
        rig.fleet.drain("w-0")
        await asyncio.sleep(0.1)
        await rig.registry.set_draining("w-0", False)
        await rig.until("w-0", WorkerPhase.READY)
        rig.engine.now = EngineLoad()
        await asyncio.sleep(0.2)
        seen = rig.seen("w-0")
        assert seen is not None
        assert (seen.phase, seen.held) == (WorkerPhase.READY, True)


async def test_a_worker_that_dies_at_start_counts_as_starting_and_can_be_cancelled(
    tmp_path: Path,
) -> None:
    class Dying(FakeLauncher):
        async def start(self, name: str, plan: LaunchPlan) -> FakeProcess:
            process = await super().start(name, plan)
            if name == "w-1":
                process.die()
            return process

    async with running(tmp_path, launcher=Dying()) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        rig.engine.well = False
        rig.fleet.launch(Role.BOTH)
        await until(lambda: len(rig.launcher.processes) >= 4)
        one = rig.seen("w-1")
        assert one is not None
        assert (one.phase, one.held) == (WorkerPhase.STARTING, False)
        assert one.age_s > 0
        rig.fleet.cancel("w-1")
        await rig.until("w-1", None)


async def test_a_launch_that_is_cancelled_when_its_worker_has_become_ready_drains_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        rig.fleet.launch(Role.BOTH)
        await rig.until("w-1", WorkerPhase.READY)
        rig.doors.requests["w-1"] = 1
        assert rig.fleet.cancel("w-1").text == "w-1 drains"
        await asyncio.sleep(0.2)
        assert rig.phase("w-1") is WorkerPhase.DRAINING, "front doors had sent it a request"
        rig.doors.requests.clear()
        await rig.until("w-1", None)


async def test_a_launcher_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    class Hanging(FakeLauncher):
        async def start(self, name: str, plan: LaunchPlan) -> FakeProcess:
            if name != "w-0":
                await asyncio.Event().wait()
            return await super().start(name, plan)

    async with running(tmp_path, launcher=Hanging()) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        assert rig.fleet.launch(Role.BOTH).done
        assert rig.fleet.launch(Role.BOTH).text == "w-2 starts"
        await asyncio.sleep(0.05)
        assert rig.phase("w-1") is WorkerPhase.STARTING
        assert rig.fleet.cancel("w-1").done
        await rig.until("w-1", None)


async def test_a_launch_that_can_never_start_ends_no_deployment_and_the_next_one_waits(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        rig.engine.launch_error = ConfigError(["no such device"], "w")
        rig.fleet.launch(Role.BOTH)
        await rig.until("w-1", None)
        refused = rig.fleet.launch(Role.BOTH)
        assert not refused.done
        assert "could not start" in refused.text
        (unready,) = rig.fleet.unready()
        assert (unready.worker_id, unready.state.value) == ("w-1", "failing")
        assert unready.cause is not None
        assert rig.phase("w-0") is WorkerPhase.READY


async def test_a_first_worker_that_can_never_start_ends_the_deployment(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1.0, FakeLauncher())
    rig.engine.launch_error = ConfigError(["no such device"], "w")
    rig.fleet.begin([rig.spec(0)])
    with pytest.raises(ConfigError, match="no such device"):
        await rig.fleet.run()
    await rig.registry.close()


async def test_workers_of_another_deployment_count_and_are_left_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        other = Rig(tmp_path, 1.0, FakeLauncher())
        other.fleet = Fleet(
            rig.registry,
            lambda spec: WorkerAgent(spec, RUNTIME, rig.registry, other.launcher, tmp_path),
            time.monotonic,
            drain_timeout_s=1.0,
        )
        other.fleet.begin([other.spec(7)])
        task = asyncio.create_task(other.fleet.run())
        await rig.until("w-7", WorkerPhase.READY)
        seen = rig.seen("w-7")
        assert seen is not None
        assert seen.held
        assert not rig.fleet.drain("w-7").done
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.until("w-7", None)
