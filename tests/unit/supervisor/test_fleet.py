"""A fleet launches, drains and stops workers without ever making its planner wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve
from tests.support.supervised import INFO, FakeEngine, FakeLauncher, FakeProcess

from commutator.config.model import RuntimeConfig
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.launcher import LaunchPlan
from commutator.contract.planner import PlannedWorker, WorkerPhase
from commutator.contract.worker import EngineLoad, KvTransferInfo, Role
from commutator.demand import DoorReports
from commutator.errors import ConfigError
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.fleet import Fleet
from commutator.supervisor.specs import WorkerSpec
from commutator.supervisor.worker_agent import WorkerAgent

RUNTIME = RuntimeConfig(restart_backoff_s=0.01, lease_s=30.0)
BUSY = EngineLoad(running=1)
HANDOVER = KvTransferInfo(protocol="p", identity="i", block_size=4, token_bytes=8)


class Engine(FakeEngine):
    """Tells the load that the test sets."""

    def __init__(self) -> None:
        super().__init__(("engine",))
        self.now = EngineLoad()

    async def load(self) -> EngineLoad:
        return self.now

    async def close(self) -> None:
        pass


class Doors(DoorReports):
    """What the front doors have in flight, as the test says."""

    def __init__(self) -> None:
        super().__init__(silence_s=5.0, gone_s=15.0)
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

    def spec(
        self,
        number: int,
        role: Literal["both", "prefill", "decode"] = "both",
        **options: Any,
    ) -> WorkerSpec:
        name = "w" if role == "both" else role
        return WorkerSpec(
            worker_id=f"{name}-{number}",
            config=EngineConfig(kind="fake", name=name, role=role, **options),
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
        await until(lambda: "w-1" not in rig.fleet._members)
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


@asynccontextmanager
async def disaggregated(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    """A prefill worker and two that decode, with these options more."""
    rig = Rig(folder, 600.0, FakeLauncher())
    rig.engine.info = evolve(INFO, handover=HANDOVER)
    decodes = [rig.spec(number, "decode", **options) for number in (0, 1)]
    rig.fleet.begin([rig.spec(0, "prefill"), *decodes])
    task = asyncio.create_task(rig.fleet.run())
    try:
        await rig.until("decode-1", WorkerPhase.READY)
        await rig.until("prefill-0", WorkerPhase.READY)
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.registry.close()


async def test_a_worker_changes_its_role_when_its_last_request_has_ended(tmp_path: Path) -> None:
    async with disaggregated(tmp_path) as rig:
        one = rig.seen("decode-1")
        assert one is not None
        assert (one.role, list(one.may_become)) == (Role.DECODE, [Role.PREFILL])
        rig.doors.requests["decode-1"] = 1
        done = rig.fleet.set_role("decode-1", Role.PREFILL)
        assert done.text == "decode-1 drains to become prefill"
        assert not rig.fleet.set_role("decode-1", Role.PREFILL).done, "once"
        assert not rig.fleet.drain("decode-1").done
        await asyncio.sleep(0.2)
        one = rig.seen("decode-1")
        assert one is not None
        assert (one.role, one.phase) == (Role.PREFILL, WorkerPhase.STARTING)
        rig.doors.requests.clear()
        await rig.until("decode-1", WorkerPhase.READY)
        one = rig.seen("decode-1")
        assert one is not None
        assert (one.role, one.held, list(one.may_become)) == (Role.PREFILL, False, [Role.DECODE])
        assert len(rig.launcher.processes) == 3, "no process was started or stopped"
        rig.fleet.set_role("decode-1", Role.DECODE)
        await until(lambda: (back := rig.seen("decode-1")) is not None and back.role is Role.DECODE)
        await rig.until("decode-1", WorkerPhase.READY)


async def test_a_change_of_role_that_is_cancelled_leaves_the_worker_as_it_was(
    tmp_path: Path,
) -> None:
    async with disaggregated(tmp_path) as rig:
        rig.doors.requests["decode-1"] = 1
        rig.fleet.set_role("decode-1", Role.PREFILL)
        await asyncio.sleep(0.1)
        assert rig.fleet.cancel("decode-1").text == "decode-1 stays decode"
        one = rig.seen("decode-1")
        assert one is not None
        assert (one.role, one.phase, one.held) == (Role.DECODE, WorkerPhase.READY, False)
        await asyncio.sleep(0.1)
        await rig.registry.set_draining("decode-1", True)  # by hand, and it is known as such
        await rig.until("decode-1", WorkerPhase.DRAINING)
        one = rig.seen("decode-1")
        assert one is not None
        assert one.held


async def test_a_change_of_role_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 0.2, FakeLauncher())
    rig.engine.info = evolve(INFO, handover=HANDOVER)
    rig.fleet.begin([rig.spec(0, "prefill"), rig.spec(0, "decode")])
    task = asyncio.create_task(rig.fleet.run())
    await rig.until("decode-0", WorkerPhase.READY)
    rig.doors.requests["decode-0"] = 1
    rig.fleet.set_role("decode-0", Role.PREFILL)
    await until(lambda: (one := rig.seen("decode-0")) is not None and one.role is Role.DECODE)
    one = rig.seen("decode-0")
    assert one is not None
    assert (one.phase, list(one.may_become)) == (WorkerPhase.READY, []), "not again at once"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.registry.close()


async def test_workers_of_other_options_or_without_a_handover_keep_their_role(
    tmp_path: Path,
) -> None:
    async with disaggregated(tmp_path, start_timeout_s=77.0) as rig:
        one = rig.seen("decode-1")
        assert one is not None
        assert not one.may_become
    async with running(tmp_path) as rig:
        await rig.until("w-0", WorkerPhase.READY)
        one = rig.seen("w-0")
        assert one is not None
        assert not one.may_become


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
