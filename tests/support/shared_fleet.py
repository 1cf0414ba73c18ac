"""Principals that share simulated workers in virtual time, behind the real router and queue."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from typing import Any

from attrs import define, field
from tests.support.virtual_time import VirtualTimeLoop

from commutator.config.model import Config
from commutator.contract.engine import EngineClient, EngineConfig, EngineConnector, LaunchContext
from commutator.contract.engine import ModelConfig as ServedModel
from commutator.contract.fairness import FairnessConfig
from commutator.contract.request import Caller, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import EngineInfo, EngineLoad, WorkerRecord
from commutator.errors import OverloadedError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, load_plugins
from commutator.routing.dispatcher import Dispatcher
from commutator_sim.config import SimConfig
from commutator_sim.engine import SimEngine

__all__ = ["Client", "Fleet", "Served", "run_fleet"]


class _SimClient(EngineClient):
    """A ``SimEngine`` in this process, without a socket."""

    def __init__(self) -> None:
        config = SimConfig(kind="sim", name="e", model="m", prefix_caching=False)
        self._engine = SimEngine(config, model="m", max_model_len=8192)
        self._keys = count()
        self._queues: dict[int, asyncio.Queue[TokenDelta]] = {}
        self._info: EngineInfo | None = None

    async def start(self) -> EngineInfo:
        if self._info is None:
            self._info = self._engine.start(self._emit)
        return self._info

    def _emit(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        for key, delta in deltas:
            if key in self._queues:
                self._queues[key].put_nowait(delta)

    def generate(self, request: GenerateRequest) -> Any:
        async def stream() -> AsyncIterator[TokenDelta]:
            key = next(self._keys)
            queue = self._queues[key] = asyncio.Queue()
            try:
                self._engine.submit(key, request)
                while True:
                    delta = await queue.get()
                    yield delta
                    if delta.finish_reason is not None:
                        return
            finally:
                del self._queues[key]
                self._engine.abort(key)

        return stream()

    async def load(self) -> EngineLoad:
        return self._engine.load()

    async def close(self) -> None:
        self._engine.stop()


class _SimConnector(EngineConnector[EngineConfig]):
    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> None:
        return None

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        return _SimClient()


@define
class Client:
    """One principal's requests. Their lengths vary by half, so that workers get out of step."""

    principal: str | None
    prompt_tokens: int
    answer_tokens: int
    per_s: float | None = None
    """Requests in a second, at random times; None: ``concurrent`` clients, one after the other."""
    concurrent: int = 0
    weight: float = 1.0
    priority: int = 0


@define
class Served:
    """What came of the requests of each principal."""

    latencies_s: dict[str | None, list[float]] = field(factory=dict)
    """From a request to the end of its answer, of those that ended in time."""
    tokens: Counter[str | None] = field(factory=Counter)
    """Prompt tokens of those that began, plus twice the generated tokens."""
    refused: Counter[str | None] = field(factory=Counter)

    def p99_s(self, principal: str | None) -> float:
        ordered = sorted(self.latencies_s[principal])
        return ordered[int(len(ordered) * 0.99)]


@define
class Fleet:
    """Workers, and the front door before them."""

    workers: int = 8
    max_active_requests: int = 4
    fairness: str = "weighted"
    max_queued_requests: int = 1024
    measure_from_s: float = 5.0
    """Tokens count from here, when the queue has filled."""
    for_s: float = 60.0


def run_fleet(fleet: Fleet, clients: Sequence[Client], seed: int = 1) -> Served:
    """Serve ``clients`` for ``fleet.for_s`` seconds of virtual time. Deterministic."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_run(fleet, clients, seed))


async def _run(fleet: Fleet, clients: Sequence[Client], seed: int) -> Served:
    host = load_plugins()

    class Engines:
        @hookimpl
        def engine_register(self, register: Any) -> None:
            register("in_process", EngineConfig, _SimConnector())

    host.add(Engines(), Installed("in_process", "dist", "1"))
    router = host.routers.kinds["least_loaded"].config_class(
        kind="least_loaded",
        busy=BusyConfig(
            max_active_requests=fleet.max_active_requests,
            max_queued_requests=fleet.max_queued_requests,
            max_queue_s=3600.0,
            fairness=_fairness(host.fairness.kinds[fleet.fairness].config_class, fleet.fairness),
        ),
    )
    config = Config(
        models=(ServedModel(name="m", source="-"),),
        engines=(EngineConfig(kind="in_process", name="e", model="m"),),
        router=router,
    )
    dispatcher = Dispatcher(config, host, random.Random(seed))
    for number in range(fleet.workers):
        await dispatcher.membership.worker_up(
            WorkerRecord(
                worker_id=f"w-{number}", engine="e", kind="in_process", model="m",
                address=f"w-{number}", info=await _SimClient().start(),
            )
        )  # fmt: skip
    served = Served()
    shop = _Shop(dispatcher, fleet, served, random.Random(seed))
    for client in clients:
        served.latencies_s.setdefault(client.principal, [])
        if client.per_s is None:
            for _ in range(client.concurrent):
                shop.spawn(shop.one_after_the_other(client))
        else:
            shop.spawn(shop.at_random_times(client, client.per_s))
    await asyncio.sleep(fleet.for_s)
    for task in list(shop.tasks):
        task.cancel()
    await asyncio.gather(*shop.tasks, return_exceptions=True)
    await dispatcher.close()
    return served


def _fairness(config_class: Any, kind: str) -> FairnessConfig:
    made: FairnessConfig = config_class(kind=kind)
    return made


class _Shop:
    def __init__(
        self, dispatcher: Dispatcher, fleet: Fleet, served: Served, rng: random.Random
    ) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._served = served
        self._rng = rng
        self._numbers = count()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def one_after_the_other(self, client: Client) -> None:
        while True:
            await self._request(client)

    async def at_random_times(self, client: Client, per_s: float) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(per_s))
            self.spawn(self._request(client))

    async def _request(self, client: Client) -> None:
        loop, served, name = asyncio.get_running_loop(), self._served, client.principal
        arrived_s = loop.time()
        request = GenerateRequest(
            request_id=f"r-{next(self._numbers)}",
            token_ids=[7] * self._about(client.prompt_tokens),
            sampling=SamplingParams(max_tokens=self._about(client.answer_tokens), ignore_eos=True),
            priority=client.priority,
        )
        caller = Caller(principal=name, weight=client.weight)
        try:
            dispatch = await self._dispatcher.dispatch("m", request, caller)
        except OverloadedError:
            served.refused[name] += 1
            await asyncio.sleep(1.0)
            return
        try:
            self._count(name, len(request.token_ids))
            async for delta in dispatch:
                self._count(name, 2 * len(delta.token_ids))
        finally:
            await dispatch.aclose()
        served.latencies_s[name].append(loop.time() - arrived_s)

    def _about(self, tokens: int) -> int:
        return self._rng.randint(tokens // 2, tokens + tokens // 2)

    def _count(self, name: str | None, tokens: int) -> None:
        if asyncio.get_running_loop().time() >= self._fleet.measure_from_s:
            self._served.tokens[name] += tokens


def shares(tokens: Mapping[str | None, int]) -> dict[str | None, float]:
    """The part of all tokens that each principal got."""
    total = sum(tokens.values())
    return {name: count / total for name, count in tokens.items()}
