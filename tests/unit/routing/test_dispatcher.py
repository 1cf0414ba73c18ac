"""The dispatcher: which workers it asks, what hooks see, and that its accounts always close."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from tests.support.faults import Faults, FaultyClient
from tests.support.virtual_time import in_virtual_time

from commutator.config.model import Config
from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    ModelConfig,
)
from commutator.contract.planner import PlannerBounds, PlannerConfig
from commutator.contract.request import (
    Caller,
    FinishReason,
    GenerateRequest,
    RequestSummary,
    SamplingParams,
    TokenDelta,
)
from commutator.contract.routing import BusyConfig, Decision, RouteRequest
from commutator.contract.worker import EngineInfo, EngineLoad, WorkerRecord
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RoutingError,
)
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, load_plugins
from commutator.routing.dispatcher import Dispatcher
from commutator_round_robin import RoundRobin


def info() -> EngineInfo:
    return EngineInfo(
        kind="fake", version="1", model="m", max_model_len=128, block_size=16, kv_capacity_blocks=64
    )


class FakeClient(EngineClient):
    """Streams max_tokens tokens, one at a time, or fails as its address says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open_streams = 0
        self.reachable = True
        self.info = info()

    async def start(self) -> EngineInfo:
        if not self.reachable:
            raise EngineUnavailableError(f"{self.address}: connection refused")
        return self.info

    def generate(self, request: GenerateRequest) -> Any:
        async def stream() -> AsyncIterator[TokenDelta]:
            self.open_streams += 1
            try:
                last = request.sampling.max_tokens - 1
                for i in range(last + 1):
                    await asyncio.sleep(0)
                    yield TokenDelta(
                        token_ids=(i,),
                        cached_tokens=3 if i == 0 else None,
                        finish_reason=FinishReason.LENGTH if i == last else None,
                    )
            finally:
                self.open_streams -= 1

        return stream()

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        pass


class FakeConnector(EngineConnector[EngineConfig]):
    def __init__(self, faults: Faults, seed: int) -> None:
        self.clients: dict[str, FakeClient] = {}
        self._seed = seed
        self._faults = faults

    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> None:
        return None

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        client = self.clients.setdefault(address, FakeClient(address))
        self._seed += 1
        return FaultyClient(client, self._faults, self._seed)


class Watcher:
    """Counts every life-cycle hook."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.failures: list[BaseException] = []

    @hookimpl
    def worker_up(self) -> None:
        self.seen.append("up")

    @hookimpl
    def worker_down(self, reason: str) -> None:
        self.seen.append(f"down: {reason}")

    @hookimpl
    def request_received(self) -> None:
        self.seen.append("received")

    @hookimpl
    def request_routed(self) -> None:
        self.seen.append("routed")

    @hookimpl
    def request_first_token(self) -> None:
        self.seen.append("first token")

    @hookimpl
    def request_finished(self, outcome: Any) -> None:
        assert outcome.cached_tokens == 3
        self.seen.append("finished")

    @hookimpl
    def request_failed(self, error: BaseException) -> None:
        self.seen.append("failed")
        self.failures.append(error)


class Setup:
    def __init__(
        self,
        faults: Faults | None = None,
        seed: int = 0,
        router: str = "round_robin",
        busy: BusyConfig | None = None,
        on_waiting: Callable[[int], None] = lambda _: None,
        from_zero: bool = False,
    ) -> None:
        self.connector = FakeConnector(faults or Faults(), seed)
        self.watcher = Watcher()
        self.host = load_plugins()
        connector = self.connector

        class Engines:
            @hookimpl
            def engine_register(self, register: Any) -> None:
                register("fake", EngineConfig, connector)

        self.host.add(Engines(), Installed("fake", "dist-fake", "1"))
        self.host.add(self.watcher, Installed("watcher", "dist-watcher", "1"))
        config = Config(
            models=(ModelConfig(name="m", source="-"),),
            engines=(EngineConfig(kind="fake", name="e", model="m"),),
            router=self.host.routers.kinds[router].config_class(
                kind=router, busy=busy or BusyConfig()
            ),
            planner=PlannerConfig(kind="none", bounds=PlannerBounds(both=(0, 4)))
            if from_zero
            else None,
        )
        self.dispatcher = Dispatcher(config, self.host, random.Random(1), on_waiting)

    async def up(self, *names: str) -> None:
        for name in names:
            await self.dispatcher.membership.worker_up(
                WorkerRecord(
                    worker_id=name, engine="e", kind="fake", model="m", address=name, info=info()
                )
            )

    async def run(self, request_id: str, max_tokens: int = 3) -> str:
        dispatch = await self.dispatcher.dispatch("m", request(request_id, max_tokens))
        try:
            async for _ in dispatch:
                pass
        finally:
            await dispatch.aclose()
        return dispatch.worker_id

    def active(self) -> int:
        return sum(worker.active_requests for worker in self.dispatcher.status())


def request(request_id: str, max_tokens: int = 3, priority: int = 0) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=request_id, token_ids=[1] * 20, sampling=sampling, priority=priority
    )


async def test_hooks_see_a_request_once_and_in_order() -> None:
    setup = Setup()
    await setup.up("w-0")
    await setup.run("a")
    assert setup.watcher.seen == ["up", "received", "routed", "first token", "finished"]
    assert setup.active() == 0
    await setup.dispatcher.membership.worker_down("w-0", "stopped")
    assert setup.watcher.seen[-1] == "down: stopped"


async def test_policies_and_observers_see_the_headers_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    seen: list[Mapping[str, str]] = []
    pick = RoundRobin.pick

    def noting_pick(policy: RoundRobin, request: RouteRequest, *rest: Any) -> Decision:
        seen.append(request.headers)
        return pick(policy, request, *rest)

    class Observer:
        @hookimpl
        def request_received(self, request: RequestSummary) -> None:
            seen.append(request.headers)

    monkeypatch.setattr(RoundRobin, "pick", noting_pick)
    setup.host.add(Observer(), Installed("observer", "dist-observer", "1"))
    await setup.up("w-0", "w-1")
    caller = Caller(headers={"x-team": "blue"})
    dispatch = await setup.dispatcher.dispatch("m", request("a"), caller)
    await dispatch.aclose()
    assert seen == [{"x-team": "blue"}] * 2
    await setup.dispatcher.close()


async def test_workers_are_used_in_turn_and_drained_ones_left_out() -> None:
    setup = Setup()
    await setup.up("w-0", "w-1", "w-2")
    assert [await setup.run(str(i)) for i in range(4)] == ["w-0", "w-1", "w-2", "w-0"]
    await setup.dispatcher.membership.worker_up(
        WorkerRecord(
            worker_id="w-1",
            engine="e",
            kind="fake",
            model="m",
            address="w-1",
            info=info(),
            draining=True,
        )
    )
    assert [await setup.run(str(i)) for i in range(3)] == ["w-2", "w-0", "w-2"]
    assert [worker.state for worker in setup.dispatcher.status()] == ["ready", "draining", "ready"]


async def test_without_workers_requests_fail() -> None:
    setup = Setup()
    assert not setup.dispatcher.ready()
    with pytest.raises(RoutingError, match='no worker is ready for model "m"'):
        await setup.run("a")
    assert setup.watcher.seen == ["received", "failed"]


@in_virtual_time
async def test_a_dead_worker_is_left_out_and_comes_back() -> None:
    setup = Setup()
    await setup.up("w-0", "w-1")
    setup.connector.clients["w-0"].reachable = False
    assert [await setup.run(str(i)) for i in range(3)] == ["w-1"] * 3
    assert "unreachable" in [worker.state for worker in setup.dispatcher.status()]
    setup.connector.clients["w-0"].reachable = True
    async with asyncio.timeout(3):
        while await setup.run("again") != "w-0":
            await asyncio.sleep(0.02)
    await setup.dispatcher.close()


async def test_hashes_that_are_known_are_not_made_again() -> None:
    assert Setup().dispatcher.hashed_block_size("m") is None, (
        "this policy does not look at overlaps"
    )
    setup = Setup(router="kv")
    await setup.up("w-0")
    assert setup.dispatcher.hashed_block_size("m") == 16
    overlaps = []
    for number, known in enumerate([[77], [77], None]):
        dispatch = await setup.dispatcher.dispatch("m", request(str(number)), sequence_hashes=known)
        overlaps.append(dispatch.route.candidate.overlap.blocks)
        async for _ in dispatch:
            pass
        await dispatch.aclose()
    assert overlaps == [0, 1, 0], "the given hash is the one that was looked up"
    await setup.dispatcher.close()


async def test_a_client_that_leaves_closes_everything() -> None:
    setup = Setup()
    await setup.up("w-0")
    dispatch = await setup.dispatcher.dispatch("m", request("a", 100))
    await anext(dispatch)
    assert setup.active() == 1
    await dispatch.aclose()
    await dispatch.aclose()
    assert setup.active() == 0
    assert setup.connector.clients["w-0"].open_streams == 0
    assert setup.watcher.seen.count("failed") == 1
    assert isinstance(setup.watcher.failures[0], asyncio.CancelledError)


@pytest.mark.parametrize("seed", range(5))
@in_virtual_time
async def test_accounts_close_under_every_fault(seed: int) -> None:
    faults = Faults(0.2, 0.02, 0.02, 0.02, 0.02, 0.05, 0.001)
    setup = Setup(faults, seed)
    await setup.up("w-0", "w-1", "w-2")
    ended: list[str] = []

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.01)  # long enough overall for lost workers to come back
        try:
            await setup.run(f"r-{i}", max_tokens=10)
            ended.append("finished")
        except (EngineError, RoutingError) as error:
            ended.append(type(error).__name__)

    await asyncio.gather(*(one(i) for i in range(60)))
    assert len(ended) == 60
    assert "finished" in ended
    assert setup.watcher.seen.count("received") == 60
    assert setup.watcher.seen.count("finished") == ended.count("finished")
    assert setup.watcher.seen.count("failed") == 60 - ended.count("finished")
    assert setup.active() == 0
    assert all(client.open_streams == 0 for client in setup.connector.clients.values())
    await setup.dispatcher.close()


async def test_overload_does_not_take_a_worker_out() -> None:
    setup = Setup(Faults(overloaded=1.0))
    await setup.up("w-0")
    for _ in range(3):
        with pytest.raises(EngineOverloadedError):
            await setup.run("a")
    assert setup.dispatcher.ready()


async def test_another_instance_at_a_known_address_is_connected_anew() -> None:
    """Ports are used again: what was known of the process before does not hold for this one."""
    setup = Setup()
    await setup.up("w-0")
    connections = setup.connector._seed
    again = WorkerRecord(
        worker_id="w-0",
        engine="e",
        kind="fake",
        model="m",
        address="w-0",
        info=info(),
        instance="restarted",
    )
    await setup.dispatcher.membership.worker_up(again)
    assert setup.connector._seed == connections + 1
    await setup.dispatcher.membership.worker_up(again)
    assert setup.connector._seed == connections + 1
    assert await setup.run("1") == "w-0"
