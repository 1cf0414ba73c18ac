"""The agent of one worker: when it is announced, when it is withdrawn, when it gives up."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from commutator import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    LaunchPlan,
    ModelConfig,
)
from commutator.config.model import RuntimeConfig
from commutator.engine.contract import TokenStream
from commutator.errors import ConfigError, EngineUnavailableError
from commutator.runtime.guardian import Guardian
from commutator.runtime.lease import Change, Down, Up
from commutator.runtime.ports import PortPicker
from commutator.runtime.process import Launcher
from commutator.runtime.registry import MemoryRegistry
from commutator.runtime.worker_agent import WorkerAgent, WorkerSpec
from commutator.types import EngineInfo, EngineLoad, GenerateRequest, HandoverInfo, Role

INFO = EngineInfo("fake", "1", "m", 1, 1, 1)
SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


class FakeEngine(EngineConnector[EngineConfig], EngineClient):
    """Connector and client in one; the test decides what it answers."""

    def __init__(self, argv: tuple[str, ...] | None) -> None:
        self.argv = argv
        self.well = True
        self.info = INFO
        self.starts = 0
        self.contexts: list[LaunchContext] = []
        self.launch_error: Exception | None = None
        self.health_error: Exception = EngineUnavailableError("silent")

    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> LaunchPlan | None:
        self.contexts.append(context)
        if self.launch_error is not None:
            raise self.launch_error
        if self.argv is None:
            return None
        return LaunchPlan(self.argv, f"{context.host}:{context.port}")

    def attach_address(self, config: EngineConfig) -> str:
        return "elsewhere:1"

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        return self

    async def start(self) -> EngineInfo:
        self.starts += 1
        if not self.well:
            raise EngineUnavailableError("refused")
        return self.info

    async def check_health(self) -> None:
        if not self.well:
            raise self.health_error

    async def load(self) -> EngineLoad:
        return EngineLoad()

    def generate(self, request: GenerateRequest) -> TokenStream:
        raise NotImplementedError

    async def close(self) -> None:
        raise RuntimeError("a close that fails must not matter")


class Watched:
    """An agent at work, and what the registry tells of it."""

    def __init__(self, agent: WorkerAgent, registry: MemoryRegistry) -> None:
        self.agent = agent
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        self.watching = asyncio.create_task(self._watch(registry))
        self.running = asyncio.create_task(agent.run())

    async def _watch(self, registry: MemoryRegistry) -> None:
        async for batch in registry.watch():
            for change in batch:
                self.changes.put_nowait(change)

    async def next(self) -> Change:
        async with asyncio.timeout(5):
            return await self.changes.get()

    async def stop(self) -> None:
        for task in (self.running, self.watching):
            task.cancel()
        await asyncio.gather(self.running, self.watching, return_exceptions=True)


Watch = Callable[..., Watched]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watch]:
    guardian = Guardian(tmp_path / "state")
    await guardian.start()
    launcher = Launcher(guardian, lambda *_: None, os.environ)
    registry = MemoryRegistry()
    begun: list[Watched] = []

    def begin(engine: FakeEngine, start_timeout_s: float = 5.0, **runtime: Any) -> Watched:
        config = EngineConfig(
            kind="fake",
            name="fake",
            start_timeout_s=start_timeout_s,
            replicas=runtime.pop("replicas", 1),
            role=runtime.pop("role", "both"),
        )
        model = ModelConfig(name="m", source="-")
        settings = RuntimeConfig(**{"lease_s": 0.3, "restart_backoff_s": 0.05} | runtime)
        spec = WorkerSpec("fake-0", config, model, engine)
        agent = WorkerAgent(spec, settings, registry, launcher, PortPicker(), tmp_path)
        begun.append(Watched(agent, registry))
        return begun[-1]

    yield begin
    for watched in begun:
        await watched.stop()
    await registry.close()
    await guardian.close()


async def test_a_worker_is_announced_kept_and_withdrawn(watch: Watch) -> None:
    engine = FakeEngine(SLEEP)
    watched = watch(engine)
    up = await watched.next()
    assert isinstance(up, Up)
    (context,) = engine.contexts
    assert up.record.address == f"127.0.0.1:{context.port}"
    assert (up.record.worker_id, up.record.engine, up.record.model) == ("fake-0", "fake", "m")
    assert context.state_dir.is_dir()
    assert watched.agent.ready.is_set()
    await asyncio.sleep(0.8)
    assert watched.changes.empty(), "the lease is kept"
    watched.running.cancel()
    assert await watched.next() == Down("fake-0", "stopped")
    assert not watched.agent.ready.is_set()


async def test_death_is_told_at_once_and_another_is_started(watch: Watch) -> None:
    engine = FakeEngine((sys.executable, "-S", "-c", "import time; time.sleep(0.4)"))
    watched = watch(engine, lease_s=60.0)
    assert isinstance(await watched.next(), Up)
    assert await watched.next() == Down("fake-0", "failed")
    again = await watched.next()
    assert isinstance(again, Up)
    assert engine.contexts[0].port != engine.contexts[1].port


@pytest.mark.parametrize("error", [EngineUnavailableError("silent"), KeyError("a library's own")])
async def test_silence_lets_the_lease_lapse_and_an_answer_brings_it_back(
    watch: Watch, error: Exception
) -> None:
    engine = FakeEngine(SLEEP)
    engine.health_error = error
    watched = watch(engine)
    await watched.next()
    engine.well = False
    assert await watched.next() == Down("fake-0", "lease expired")
    engine.well = True
    assert isinstance(await watched.next(), Up)
    assert len(engine.contexts) == 1, "the process was not restarted"


async def test_a_process_that_stays_silent_is_started_anew(watch: Watch) -> None:
    engine = FakeEngine(SLEEP)
    watched = watch(engine, start_timeout_s=1.0)
    await watched.next()
    engine.well = False
    assert await watched.next() == Down("fake-0", "lease expired")
    async with asyncio.timeout(5):
        while len(engine.contexts) < 2:
            await asyncio.sleep(0.02)
    engine.well = True
    assert isinstance(await watched.next(), Up)


async def test_one_that_never_gets_ready_is_started_anew(watch: Watch) -> None:
    engine = FakeEngine(SLEEP)
    engine.well = False
    watched = watch(engine, start_timeout_s=0.3)
    async with asyncio.timeout(5):
        while len(engine.contexts) < 2:
            await asyncio.sleep(0.02)
    assert watched.changes.empty()


async def test_an_engine_that_is_only_attached_to(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(None)
    engine.well = False
    watched = watch(engine)
    await asyncio.sleep(0.3)
    engine.well = True
    up = await watched.next()
    assert isinstance(up, Up)
    assert up.record.address == "elsewhere:1"
    assert caplog.messages.count("fake-0 is waited for: refused") == 1
    engine.well = False
    assert await watched.next() == Down("fake-0", "lease expired")
    engine.well = True
    assert isinstance(await watched.next(), Up)


async def test_attaching_needs_a_single_replica(watch: Watch) -> None:
    watched = watch(FakeEngine(None), replicas=2)
    with pytest.raises(ConfigError, match="one replica only"):
        await asyncio.wait_for(watched.running, 5)


async def test_a_start_that_can_never_work_is_an_error_at_once(watch: Watch) -> None:
    engine = FakeEngine(SLEEP)
    engine.launch_error = ConfigError(["engines[0].path: no such program"])
    watched = watch(engine)
    with pytest.raises(ConfigError, match="no such program"):
        await asyncio.wait_for(watched.running, 5)


async def test_once_it_has_worked_no_error_ends_the_agent(watch: Watch) -> None:
    engine = FakeEngine((sys.executable, "-S", "-c", "import time; time.sleep(0.2)"))
    watched = watch(engine)
    await watched.next()
    engine.launch_error = ConfigError(["gone meanwhile"])
    assert await watched.next() == Down("fake-0", "failed")
    await asyncio.sleep(0.3)
    assert len(engine.contexts) > 2
    engine.launch_error = ZeroDivisionError("a connector's bug")
    await asyncio.sleep(0.4)
    assert not watched.running.done()
    engine.launch_error = None
    assert isinstance(await watched.next(), Up)


async def test_a_program_that_does_not_exist_is_tried_again(watch: Watch) -> None:
    engine = FakeEngine(("/no/such/program",))
    watched = watch(engine)
    async with asyncio.timeout(5):
        while len(engine.contexts) < 3:
            await asyncio.sleep(0.02)
    assert not watched.running.done()


async def test_a_role_needs_an_engine_that_hands_over(watch: Watch) -> None:
    watched = watch(FakeEngine(SLEEP), role="prefill")
    with pytest.raises(ConfigError, match="engine fake: its role is prefill"):
        await watched.running
    able = FakeEngine(SLEEP)
    able.info = evolve(INFO, handover=HandoverInfo("test", "m", 16, 1))
    up = await watch(able, role="prefill").next()
    assert isinstance(up, Up)
    assert up.record.role is Role.PREFILL
