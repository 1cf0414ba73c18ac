"""The agent of one worker: when it is announced, when it is withdrawn, when it gives up."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.supervised import INFO, FakeEngine, FakeLauncher

from commutator.config.model import RuntimeConfig
from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    HttpRelay,
    LaunchContext,
    ModelConfig,
)
from commutator.contract.launcher import LaunchPlan
from commutator.contract.registry import RETIRED, Change, WorkerDown, WorkerUp
from commutator.contract.worker import KvTransferInfo, Role, WorkerRecord
from commutator.engine.protocol import INSTANCE
from commutator.errors import (
    ConfigError,
    EngineUnavailableError,
    NameTakenError,
    RegistryError,
)
from commutator.launcher.child import StartFailure, report_start_failure
from commutator.registry.memory import MemoryRegistry
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator.supervisor.specs import WorkerSpec
from commutator.supervisor.worker_agent import WorkerAgent
from commutator.trust import Network, TlsFiles, use_network

PROGRAM = ("an-engine",)


class CountingRegistry(MemoryRegistry):
    def __init__(self) -> None:
        super().__init__()
        self.renewals = 0
        self.refusal: RegistryError | None = None
        """What every registration raises."""
        self.refused = 0
        self.unknown = False
        """Renewals get no answer."""
        self.on_leaving: Callable[[], None] = lambda: None
        """Called before a lease ends."""

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal
        return await super().register(record, ttl_s)

    async def deregister(self, lease_id: int, reason: str = "stopped") -> None:
        self.on_leaving()
        await super().deregister(lease_id, reason)

    async def keep_alive(self, lease_id: int) -> bool:
        self.renewals += 1
        if self.unknown:
            raise RegistryError("no answer")
        return await super().keep_alive(lease_id)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


class Watched:
    """An agent at work, its processes, and the registry's changes."""

    def __init__(
        self, agent: WorkerAgent, registry: CountingRegistry, launcher: FakeLauncher
    ) -> None:
        self.agent = agent
        self.registry = registry
        self.launcher = launcher
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        self.watching = asyncio.create_task(self._watch(registry))
        self.running = asyncio.create_task(agent.run())

    async def _watch(self, registry: MemoryRegistry) -> None:
        async for batch in registry.watch():
            for change in batch:
                self.changes.put_nowait(change)

    async def next(self) -> Change:
        async with asyncio.timeout(30):
            return await self.changes.get()

    async def stop(self) -> None:
        for task in (self.running, self.watching):
            task.cancel()
        await asyncio.gather(self.running, self.watching, return_exceptions=True)


Watch = Callable[..., Watched]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watch]:
    launcher, registry = FakeLauncher(), CountingRegistry()
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
        agent = WorkerAgent(spec, settings, registry, launcher, tmp_path)
        begun.append(Watched(agent, registry, launcher))
        return begun[-1]

    yield begin
    for watched in begun:
        await watched.stop()
    await registry.close()


async def test_a_worker_is_announced_renewed_and_withdrawn(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine, lease_s=1.0)
    up = await watched.next()
    assert isinstance(up, WorkerUp)
    (context,) = engine.contexts
    assert up.record.address == f"127.0.0.1:{context.port}"
    assert (up.record.worker_id, up.record.engine, up.record.model) == ("fake-0", "fake", "m")
    assert context.state_dir.is_dir()
    await until(watched.agent.ready.is_set)
    await until(lambda: watched.registry.renewals >= 4)
    assert watched.changes.empty(), "the lease is renewed"
    watched.running.cancel()
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="stopped")
    assert not watched.agent.ready.is_set()
    (process,) = watched.launcher.processes
    await until(lambda: process.stopped)


async def test_a_process_that_dies_leaves_at_once_and_another_is_started(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine, lease_s=60.0)
    assert isinstance(await watched.next(), WorkerUp)
    await until(lambda: watched.agent.unready is None)
    left: list[UnreadyWorker | None] = []
    watched.registry.on_leaving = lambda: left.append(watched.agent.unready)
    watched.launcher.processes[0].die()
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="failed")
    (known,) = left
    assert known is not None, "it is never in neither place"
    assert (known.state, known.cause) == (UnreadyState.DEAD, "was killed by SIGKILL")
    again = await watched.next()
    assert isinstance(again, WorkerUp)
    await until(lambda: watched.agent.unready is None)
    assert engine.contexts[0].port != engine.contexts[1].port


async def test_a_process_that_dies_while_its_agent_leaves_is_not_drained_for_ever(
    watch: Watch,
) -> None:
    watched = watch(FakeEngine(PROGRAM))
    await watched.next()
    watched.agent.leaving = RETIRED
    assert await watched.registry.set_draining("fake-0", True)
    await watched.next()
    watched.launcher.processes[0].die()
    down = await watched.next()
    assert isinstance(down, WorkerDown)
    assert down.reason == RETIRED
    up = await watched.next()
    assert isinstance(up, WorkerUp)
    assert not up.record.draining


@pytest.mark.parametrize("error", [EngineUnavailableError("silent"), KeyError("a library's own")])
async def test_silence_lets_the_lease_lapse_and_an_answer_brings_it_back(
    watch: Watch, error: Exception
) -> None:
    engine = FakeEngine(PROGRAM)
    engine.health_error = error
    watched = watch(engine)
    await watched.next()
    engine.well = False
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="lease expired")
    engine.well = True
    assert isinstance(await watched.next(), WorkerUp)
    assert len(engine.contexts) == 1, "the process was not restarted"


async def test_a_process_that_stays_silent_is_started_anew(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine, start_timeout_s=1.0)
    await watched.next()
    engine.well = False
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="lease expired")
    await until(lambda: len(engine.contexts) >= 2)
    engine.well = True
    assert isinstance(await watched.next(), WorkerUp)


async def test_one_that_never_gets_ready_is_started_anew(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    engine.well = False
    watched = watch(engine, start_timeout_s=0.3)
    assert watched.agent.unready is not None
    assert watched.agent.unready.state is UnreadyState.STARTING
    await until(lambda: len(engine.contexts) >= 2)
    assert watched.changes.empty()
    told = watched.agent.unready
    assert (told.state, told.model, told.kind) == (UnreadyState.FAILING, "m", "fake")
    assert re.fullmatch(r"failed: not ready after 0\.[3-9]\d* s: refused", told.cause or "")


@pytest.mark.parametrize("works", [True, False])
async def test_one_that_computes_before_it_is_ready_has_more_time(
    watch: Watch, works: bool
) -> None:
    engine = FakeEngine(PROGRAM)
    engine.well = False
    watched = watch(engine, start_timeout_s=0.2)
    watched.launcher.cpu_of_time = 0.5 if works else 0.01
    await until(lambda: len(engine.contexts) >= 2)  # at last also where it works, as it may spin
    assert watched.agent.unready is not None
    told = re.fullmatch(
        r"failed: not ready after (\S+) s: refused", watched.agent.unready.cause or ""
    )
    assert told is not None
    assert (float(told[1]) > 2.0) is works


async def test_an_engine_that_is_only_attached_to(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(None)
    engine.well = False
    watched = watch(engine)
    await until(lambda: engine.starts >= 3)
    assert watched.agent.unready is not None
    assert watched.agent.unready.cause == "refused"
    engine.well = True
    up = await watched.next()
    assert isinstance(up, WorkerUp)
    assert up.record.address == "elsewhere:1"
    assert caplog.messages.count("waiting for fake-0: refused") == 1
    engine.well = False
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="lease expired")
    engine.well = True
    assert isinstance(await watched.next(), WorkerUp)


async def test_attaching_needs_a_single_replica(watch: Watch) -> None:
    watched = watch(FakeEngine(None), replicas=2)
    with pytest.raises(ConfigError, match="one replica only"):
        await asyncio.wait_for(watched.running, 5)


async def test_a_start_that_can_never_work_is_an_error_at_once(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    engine.launch_error = ConfigError(["engines[0].path: no such program"])
    watched = watch(engine)
    with pytest.raises(ConfigError, match="no such program"):
        await asyncio.wait_for(watched.running, 5)


async def fail_to_start(watched: Watched, folder: Path, *, permanent: bool) -> None:
    """The last process that was started ends, and leaves the reason in its folder."""
    failure = StartFailure(problems=["device: no GPU", "and no memory"], is_permanent=permanent)
    report_start_failure(folder / "fake-0", failure)
    watched.launcher.processes[-1].die()


async def test_a_process_that_says_it_can_never_start_ends_the_agent(
    watch: Watch, tmp_path: Path
) -> None:
    engine = FakeEngine(PROGRAM)
    engine.well = False
    watched = watch(engine)
    await until(lambda: bool(watched.launcher.processes))
    await fail_to_start(watched, tmp_path, permanent=True)
    with pytest.raises(ConfigError) as caught:
        await asyncio.wait_for(watched.running, 30)
    assert str(caught.value) == "worker fake-0: 2 problems\n  device: no GPU\n  and no memory"


async def test_a_process_that_may_start_later_is_tried_again_with_its_reason(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(PROGRAM)
    engine.well = False
    watched = watch(engine)
    await until(lambda: bool(watched.launcher.processes))
    await fail_to_start(watched, tmp_path, permanent=False)
    await until(lambda: len(watched.launcher.processes) >= 2)
    (line,) = [line for line in caplog.messages if "starting it again" in line]
    assert line.startswith("fake-0 failed: device: no GPU; and no memory; starting it again in ")
    watched.launcher.processes[-1].die()
    await until(lambda: len(watched.launcher.processes) >= 3)
    assert "fake-0 was killed by SIGKILL" in caplog.messages[-1], "a reason counts once"


async def test_once_it_was_ready_even_a_permanent_reason_is_tried_again(
    watch: Watch, tmp_path: Path
) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine)
    await watched.next()
    await fail_to_start(watched, tmp_path, permanent=True)
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="failed")
    assert isinstance(await watched.next(), WorkerUp)


async def test_once_it_has_worked_no_error_ends_the_agent(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine)
    await watched.next()
    engine.launch_error = ConfigError(["gone meanwhile"])
    watched.launcher.processes[0].die()
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="failed")
    await until(lambda: len(engine.contexts) >= 3)
    engine.launch_error = ZeroDivisionError("a connector's bug")
    tries = len(engine.contexts)
    await until(lambda: len(engine.contexts) >= tries + 2)
    assert not watched.running.done()
    engine.launch_error = None
    assert isinstance(await watched.next(), WorkerUp)


async def test_a_program_that_does_not_exist_is_tried_again(watch: Watch) -> None:
    engine = FakeEngine(("/no/such/program",))
    watched = watch(engine)
    await until(lambda: len(engine.contexts) >= 3)
    assert not watched.running.done()


async def test_a_role_needs_an_engine_that_hands_over(watch: Watch) -> None:
    watched = watch(FakeEngine(PROGRAM), role="prefill")
    with pytest.raises(ConfigError, match="engine fake has the role prefill"):
        await watched.running
    able = FakeEngine(PROGRAM)
    able.info = evolve(
        INFO, handover=KvTransferInfo(protocol="test", identity="m", block_size=16, token_bytes=1)
    )
    up = await watch(able, role="prefill").next()
    assert isinstance(up, WorkerUp)
    assert up.record.role is Role.PREFILL


async def test_a_registry_out_of_reach_stops_no_engine(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine)
    watched.registry.refusal = RegistryError("out of reach")
    await until(lambda: watched.registry.refused >= 3)
    assert not watched.agent.ready.is_set()
    watched.registry.refusal = None
    up = await watched.next()
    assert isinstance(up, WorkerUp)
    assert up.record.instance
    assert len(engine.contexts) == 1, "the process was not restarted"


async def test_renewals_without_an_answer_are_logged_once_and_when_they_are_answered_again(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = watch(FakeEngine(PROGRAM))
    assert isinstance(await watched.next(), WorkerUp)
    watched.registry.unknown = True
    seen = watched.registry.renewals
    await until(lambda: watched.registry.renewals >= seen + 4)
    watched.registry.unknown = False
    # The lease has lapsed meanwhile, or it has not, as the machine was fast or slow.
    again = ("is back in the registry", "its lease is renewed again")
    await until(lambda: any(text in caplog.text for text in again))
    assert caplog.text.count("its lease was not renewed: no answer") == 1


async def test_a_name_that_another_worker_has_ends_the_first_start(watch: Watch) -> None:
    watched = watch(FakeEngine(PROGRAM))
    watched.registry.refusal = NameTakenError("fake-0", "host h2, at 10.0.0.2:1")
    with pytest.raises(ConfigError, match=r"belongs to another live worker \(host h2"):
        await asyncio.wait_for(watched.running, 30)


async def test_a_name_that_is_taken_later_is_waited_for(watch: Watch) -> None:
    engine = FakeEngine(PROGRAM)
    watched = watch(engine)
    first = await watched.next()
    watched.registry.refusal = NameTakenError("fake-0", "host h2, at 10.0.0.2:1")
    watched.launcher.processes[0].die()
    assert await watched.next() == WorkerDown(worker_id="fake-0", reason="failed")
    await until(lambda: watched.registry.refused >= 2)
    watched.registry.refusal = None
    again = await watched.next()
    assert isinstance(first, WorkerUp)
    assert isinstance(again, WorkerUp)
    assert again.record.instance != first.record.instance


class HttpEngine(FakeEngine):
    """One whose server its host relays to others."""

    def __init__(self) -> None:
        super().__init__(PROGRAM)
        self.connected: list[str] = []

    def relay(self, config: EngineConfig) -> HttpRelay:
        return HttpRelay(
            module="commutator_engine_kit.relay",
            read_paths=("/health",),
            request_paths=("/generate",),
        )

    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> LaunchPlan:
        plan = super().launch_plan(config, context)
        assert plan is not None
        return evolve(plan, address=f"http://{plan.address}?more=1")

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        self.connected.append(address)
        return super().connect(config, address)

    async def close(self) -> None:
        pass


async def test_an_http_engine_stays_on_loopback_behind_its_host_s_relay(watch: Watch) -> None:
    engine = HttpEngine()
    files = TlsFiles("ca.pem", "h1.pem", "h1.key")
    with use_network(Network("c", "h1", "0.0.0.0", "10.0.0.1", files)):
        watched = watch(engine, lease_s=60.0)
        up = await watched.next()
        assert isinstance(up, WorkerUp)
        (context,) = engine.contexts
        assert (context.host, context.advertise) == ("127.0.0.1", "127.0.0.1")
        own = f"http://127.0.0.1:{context.port}?more=1"
        server, relay = watched.launcher.plans
        assert server.address == own
        assert engine.connected == [own, up.record.address], "front doors can reach it"
        assert up.record.address == relay.address
        assert re.fullmatch(r"https://10\.0\.0\.1:\d+\?more=1", relay.address)
        assert relay.env[INSTANCE] == up.record.instance == server.env[INSTANCE]
        watched.launcher.processes[1].die()
        await until(lambda: len(watched.launcher.processes) == 3)
        assert watched.launcher.plans[2] == relay, "at the same address"
        assert watched.changes.empty(), "the engine goes on"
        watched.running.cancel()
        await until(lambda: all(one.stopped for one in watched.launcher.processes))


async def test_on_one_machine_nothing_is_relayed(watch: Watch) -> None:
    watched = watch(HttpEngine())
    up = await watched.next()
    assert isinstance(up, WorkerUp)
    (server,) = watched.launcher.plans
    assert up.record.address == server.address
