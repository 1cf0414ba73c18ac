"""A dispatcher over prefill and decode workers that do as a test tells them."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import define, evolve, field

from commutator.config.model import Config, MigrationConfig
from commutator.contract.disagg import (
    DisaggAnswer,
    DisaggPolicy,
    DisaggQuestion,
    DisaggregationConfig,
    HandoverOutcome,
    HandoverRequest,
    HandoverStyle,
)
from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    ModelConfig,
)
from commutator.contract.observer import Observer
from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    RequestSummary,
    SamplingParams,
    TokenDelta,
)
from commutator.contract.routing import BusyConfig, RouterConfig
from commutator.contract.worker import EngineInfo, EngineLoad, KvTransferInfo, Role, WorkerRecord
from commutator.errors import EngineHandoverError, EngineNeedsPrefillError, EngineUnavailableError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, load_plugins
from commutator.routing.dispatch import Dispatch
from commutator.routing.dispatcher import Dispatcher

PROMPT = [7] * 40
HANDOVER = KvTransferInfo(protocol="test", identity="m", block_size=16, token_bytes=100)
INFO = EngineInfo(
    kind="fake",
    version="1",
    model="m",
    max_model_len=128,
    block_size=16,
    kv_capacity_blocks=64,
    continues_answers=True,
    handover=HANDOVER,
)
LOST = EngineUnavailableError("connection reset")
NOT_ARRIVED = EngineHandoverError("the KV did not arrive")


class Concurrent(HandoverStyle):
    sequential = False

    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        words = {"room": handover.handover_id, "leg": "prefill"}
        return evolve(handover.request, generated_prefix=0, handover=words)

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        words = {"room": handover.handover_id, "leg": "decode", "timeout_s": handover.timeout_s}
        return evolve(handover.request, handover=words)


class Sequential(Concurrent):
    sequential = True

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        if handed is None:
            raise EngineHandoverError("the prefill worker said nothing")
        return evolve(handover.request, handover=handed)


@define(eq=False)
class Worker(EngineClient):
    """Its ``troubles`` come one a leg; None: all goes well. ``holds`` keeps hand-overs back.

    A decode leg of a concurrent style hangs until the KV is there, whatever becomes of the other.
    """

    name: str
    rooms: defaultdict[str, asyncio.Event]
    info: EngineInfo = INFO
    troubles: list[Exception | None] = field(factory=list)
    holds: asyncio.Event | None = None
    alone: bool = True
    """Whether it serves whole requests."""
    asked: list[GenerateRequest] = field(factory=list)
    open: int = 0
    aborted: int = 0

    async def start(self) -> EngineInfo:
        return evolve(self.info, computes_prompts=self.alone)

    def generate(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        trouble = self.troubles.pop(0) if self.troubles else None
        words = request.handover or {}
        if words.get("leg") == "prefill":
            return self._prefill(words["room"], trouble)
        return self._answer(request, words, trouble)

    async def _prefill(self, room: str, trouble: Exception | None) -> AsyncIterator[TokenDelta]:
        with self._opened():
            yield TokenDelta(cached_tokens=16)
            if self.holds is not None:
                await self.holds.wait()
            if trouble is not None:
                raise trouble
            self.rooms[room].set()
        yield TokenDelta(
            token_ids=(99,), finish_reason=FinishReason.LENGTH, handover={"opaque": self.name}
        )

    async def _answer(
        self, request: GenerateRequest, words: Mapping[str, Any], trouble: Exception | None
    ) -> AsyncIterator[TokenDelta]:
        begun, end = request.generated_prefix, request.sampling.max_tokens
        with self._opened():
            if not (words or self.alone):
                raise EngineNeedsPrefillError(f"{self.name} computes no prompts")
            if words and trouble is not None:
                raise trouble
            if "room" in words:
                await self.rooms[words["room"]].wait()
            for token in range(begun, end - 1):
                await asyncio.sleep(0)
                if trouble is not None and token == 3:
                    raise trouble
                yield TokenDelta(token_ids=(token,), cached_tokens=0 if token == begun else None)
        yield TokenDelta(token_ids=(end - 1,), finish_reason=FinishReason.LENGTH)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.open -= 1

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        pass


class Scripted(DisaggPolicy):
    """Separates prefill and decode unless a test says otherwise."""

    def __init__(self) -> None:
        self.questions: list[DisaggQuestion] = []
        self.answer: Any = DisaggAnswer(separate=True, reason="told to", terms={"worth": 1.0})

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        self.questions.append(question)
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: DisaggAnswer = self.answer
        return answer


class World(Observer):
    """Observes the hooks. ``e`` engines have ``style``, ``other`` ones none."""

    def __init__(
        self,
        style: HandoverStyle | None = None,
        *,
        busy: BusyConfig | None = None,
        router: str = "round_robin",
        **apart: Any,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.rooms: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.policy = Scripted()
        self.told: list[tuple[Any, ...]] = []
        self.handovers: list[HandoverOutcome] = []
        world = self

        class Connector(EngineConnector[EngineConfig]):
            def launch_plan(self, config: EngineConfig, context: LaunchContext) -> None:
                return None

            def connect(self, config: EngineConfig, address: str) -> EngineClient:
                return world.workers[address]

            def handover_style(self, config: EngineConfig) -> HandoverStyle | None:
                return (style or Concurrent()) if config.name == "e" else None

        class Plugin:
            @hookimpl
            def engine_register(self, register: Any) -> None:
                register("fake", EngineConfig, Connector())

            @hookimpl
            def disagg_register(self, register: Any) -> None:
                register("scripted", DisaggregationConfig, lambda _: world.policy)

        host = load_plugins()
        host.add(Plugin(), Installed("fake", "dist-fake", "1"))
        own = host.routers.kinds[router].config_class
        config = Config(
            models=(ModelConfig(name="m", source="-"),),
            engines=tuple(EngineConfig(kind="fake", name=n, model="m") for n in ("e", "other")),
            router=RouterConfig(kind="round_robin"),
            disaggregation=DisaggregationConfig(
                kind="scripted", router=own(kind=router, busy=busy or BusyConfig()), **apart
            ),
            migration=MigrationConfig(wait_s=0.0),
        )
        self.dispatcher = Dispatcher(config, host, random.Random(1))
        host.add_observer("world", self)

    def request_queued(self, request: RequestSummary, queue: str, waited_s: float) -> None:
        self.told.append(("queued", queue, waited_s > 0))

    def disagg_decided(self, request: RequestSummary, answer: DisaggAnswer) -> None:
        self.told.append(("decided", answer.separate, answer.reason))

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        self.handovers.append(handover)

    def sides(self) -> list[tuple[str, str | None]]:
        """How prefill and decode ended, for each try."""
        return [(outcome.prefill, outcome.decode) for outcome in self.handovers]

    async def up(self, name: str, engine: str = "e", **changes: Any) -> Worker:
        worker = self.workers[name] = Worker(name, self.rooms, **changes)
        role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
        record = WorkerRecord(
            worker_id=name,
            engine=engine,
            kind="fake",
            model="m",
            address=name,
            info=worker.info,
            role=role,
        )
        await self.dispatcher.membership.worker_up(record)
        return worker

    async def begin(self, max_tokens: int = 5, **dispatch: Any) -> Dispatch:
        request = GenerateRequest(
            request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_tokens=max_tokens)
        )
        return await self.dispatcher.dispatch("m", request, **dispatch)

    async def run(self, max_tokens: int = 5) -> tuple[list[int], dict[str, Any]]:
        """The answer, and the explanation of the decision; checks that nothing is left open."""
        begun = await self.begin(max_tokens)
        try:
            got = [token async for delta in begun for token in delta.token_ids]
        finally:
            await begun.aclose()
            self.check_closed()
        explained: dict[str, Any] = begun.explain().get("disaggregation", {})
        return got, explained

    async def begin_and_read(self) -> Dispatch:
        """One whole request, beside which others may run."""
        begun = await self.begin()
        try:
            async for _ in begun:
                pass
        finally:
            await begun.aclose()
        return begun

    def check_closed(self) -> None:
        assert all(worker.open == 0 for worker in self.workers.values())
        for status in self.dispatcher.status():
            load = self.dispatcher.load.own(status.worker_id)
            assert (load.active_requests, load.active_prefill_tokens) == (0, 0), status
