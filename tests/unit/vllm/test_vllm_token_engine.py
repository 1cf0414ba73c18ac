"""The token API over vLLM's engine: what its outputs become, and what ends a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, evolve, field

from commutator import AdapterIdentity
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineInfo, EngineLoad
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator.launcher.ports import free_ports
from commutator_engine_kit.server import TokenApiServer
from commutator_testing.engines import collect, make_request
from commutator_vllm.client import TokenApiAddress, VllmTokenClient
from commutator_vllm.token_engine import LISTEN_AT, Outputs, TokenApi, VllmTokenEngine

INFO = EngineInfo(
    kind="vllm", version="0", model="m", max_model_len=64, block_size=16, kv_capacity_blocks=8
)
PROMPT = range(5)


def output(
    *token_ids: int,
    finish: str | None = None,
    stop: int | str | None = None,
    logprobs: Sequence[dict[int, float]] | None = None,
    cached: int = 0,
    handover: dict[str, Any] | None = None,
) -> Any:
    """As vLLM's RequestOutput."""
    positions = (
        None
        if logprobs is None
        else [
            {token: SimpleNamespace(logprob=logprob) for token, logprob in position.items()}
            for position in logprobs
        ]
    )
    part = SimpleNamespace(
        token_ids=list(token_ids), logprobs=positions, finish_reason=finish, stop_reason=stop
    )
    return SimpleNamespace(outputs=[part], num_cached_tokens=cached, kv_transfer_params=handover)


@define
class FakeEngine:
    """Answers when a test says so."""

    info: EngineInfo = INFO
    refusal: Exception | None = None
    broken: Exception | None = None
    adapters: set[str] = field(factory=set)
    can_load: set[str] = field(factory=set)
    outputs: dict[str, Outputs] = field(factory=dict)
    sent: list[str] = field(factory=list)
    aborted: list[str] = field(factory=list)
    resets: int = 0
    came: asyncio.Event = field(factory=asyncio.Event)
    loading: asyncio.Event = field(factory=asyncio.Event)

    def knows(self, asked: AdapterIdentity) -> bool:
        if asked == adapter("nobody"):
            raise RequestError("no adapter nobody")
        return asked.digest in self.adapters

    async def load_adapter(self, asked: AdapterIdentity) -> None:
        await self.loading.wait()
        if asked.digest not in self.can_load:
            raise RequestError(f"no adapter {asked.digest}")
        self.adapters.add(asked.digest)

    def register(self, request: GenerateRequest, outputs: Outputs) -> Any:
        if self.refusal is not None:
            raise self.refusal
        outputs.request_id = f"vllm-{request.request_id}"
        self.outputs[request.request_id] = outputs
        return outputs.request_id

    async def send(self, registered: Any) -> None:
        if self.broken is not None:
            raise self.broken
        self.sent.append(registered)
        self.came.set()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.came.set()

    def load(self) -> EngineLoad:
        if self.refusal is not None:
            raise self.refusal
        return EngineLoad(running=len(self.outputs))

    async def reset_prefix_cache(self) -> None:
        self.resets += 1


@define
class Rig:
    engine: FakeEngine
    tokens: VllmTokenEngine
    emitted: list[list[tuple[int, TokenDelta]]]
    deaths: list[int]


@pytest.fixture
def rig() -> Rig:
    engine, emitted, deaths = FakeEngine(), list[list[tuple[int, TokenDelta]]](), list[int]()
    tokens = VllmTokenEngine(cast(Any, engine), lambda: deaths.append(1))
    tokens.start(lambda deltas: emitted.append(list(deltas)))
    return Rig(engine, tokens, emitted, deaths)


async def turns() -> None:
    """Let the tasks that have begun end."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_a_step_brought_is_emitted_at_once(rig: Rig) -> None:
    for key, name in ((1, "a"), (2, "b")):
        rig.tokens.submit(key, make_request(name, PROMPT))
    await turns()
    assert rig.engine.sent == ["vllm-a", "vllm-b"]
    rig.engine.outputs["a"].put(output(7, cached=16))
    rig.engine.outputs["b"].put(output(8, 9))
    rig.engine.outputs["b"].put(output())
    await turns()
    rig.engine.outputs["a"].put(output(10, finish="stop", stop=10))
    await turns()
    assert rig.emitted == [
        [
            (1, TokenDelta(token_ids=(7,), cached_tokens=16)),
            (2, TokenDelta(token_ids=(8, 9), cached_tokens=0)),
        ],
        [(1, TokenDelta(token_ids=(10,), finish_reason=FinishReason.STOP, stop_reason=10))],
    ]
    rig.tokens.abort(1)
    await turns()
    assert rig.engine.aborted == [], "it had ended"


async def test_logprobs_are_those_of_the_tokens(rig: Rig) -> None:
    sampling = SamplingParams(top_logprobs=1)
    rig.tokens.submit(1, make_request("a", PROMPT, sampling))
    # vLLM adds the chosen token, which may not be among the likeliest.
    rig.engine.outputs["a"].put(output(7, logprobs=[{7: -3.0, 5: -0.5}]))
    rig.engine.outputs["a"].put(output(8, logprobs=[{8: float("-inf")}], finish="length"))
    await turns()
    first, last = (delta for _, delta in rig.emitted[0])
    assert [(e.token_id, e.logprob, e.top) for e in first.logprobs] == [(7, -3.0, ((5, -0.5),))]
    assert [(e.token_id, e.logprob) for e in last.logprobs] == [(8, -9999.0)]


@pytest.mark.parametrize("error", [RequestError("too long"), EngineOverloadedError("full")])
async def test_a_refused_request_is_not_known(rig: Rig, error: Exception) -> None:
    rig.engine.refusal = error
    with pytest.raises(type(error)):
        rig.tokens.submit(1, make_request("a", PROMPT))
    rig.tokens.abort(1)
    await turns()
    assert rig.engine.aborted == []
    assert rig.deaths == []


async def test_an_aborted_request_is_aborted_once(rig: Rig) -> None:
    rig.tokens.submit(1, make_request("a", PROMPT))
    rig.tokens.abort(1)
    rig.tokens.abort(1)
    await turns()
    assert rig.engine.aborted == ["vllm-a"]


def adapter(name: str) -> AdapterIdentity:
    return AdapterIdentity(name=name, digest=sha256(name.encode()).hexdigest())


async def test_an_adapter_is_loaded_first(rig: Rig) -> None:
    rig.engine.can_load = {adapter("one").digest}
    for key, name in ((1, "one"), (2, "two"), (3, "one")):
        rig.tokens.submit(key, evolve(make_request(f"r{key}", PROMPT), adapter=adapter(name)))
    rig.tokens.abort(3)
    rig.engine.loading.set()
    await turns()
    assert rig.engine.sent == ["vllm-r1"]
    ((key, delta),) = (one for step in rig.emitted for one in step)
    assert (key, delta.finish_reason, delta.error) == (
        2,
        FinishReason.ERROR,
        f"no adapter {adapter('two').digest}",
    )
    rig.tokens.submit(4, evolve(make_request("r4", PROMPT), adapter=adapter("one")))
    assert "r4" in rig.engine.outputs, "it is known now"
    with pytest.raises(RequestError):
        rig.tokens.submit(5, evolve(make_request("r5", PROMPT), adapter=adapter("nobody")))


async def test_a_dead_engine_is_reported_once(rig: Rig) -> None:
    for key, name in ((1, "a"), (2, "b")):
        rig.tokens.submit(key, make_request(name, PROMPT))
    for outputs in rig.engine.outputs.values():
        outputs.put(RuntimeError("EngineCore"))
    rig.engine.refusal = EngineUnavailableError("dead")
    with pytest.raises(EngineUnavailableError):
        rig.tokens.submit(3, make_request("c", PROMPT))
    with pytest.raises(EngineUnavailableError):
        rig.tokens.load()
    await turns()
    assert rig.deaths == [1]
    assert rig.emitted == []


async def test_a_request_that_cannot_be_sent_ends(rig: Rig) -> None:
    rig.engine.broken = ValueError("cannot be encoded")
    rig.tokens.submit(1, make_request("a", PROMPT))
    await turns()
    (((key, delta),),) = rig.emitted
    assert (key, delta.finish_reason) == (1, FinishReason.ERROR)
    rig.engine.broken = EngineUnavailableError("dead")
    rig.tokens.submit(2, make_request("b", PROMPT))
    await turns()
    assert rig.deaths == [1]


@asynccontextmanager
async def served(
    engine: FakeEngine, *, hands_over: bool = False
) -> AsyncIterator[tuple[TokenApiServer, VllmTokenClient]]:
    """A client connected to the engine."""
    stopping: list[asyncio.Task[None]] = []

    def die() -> None:
        stopping.append(asyncio.create_task(server.stop()))

    server = TokenApiServer(VllmTokenEngine(cast(Any, engine), die))
    port = await server.start("127.0.0.1", 0)
    client = VllmTokenClient(
        TokenApiAddress("http://127.0.0.1:1", f"127.0.0.1:{port}"), hands_over=hands_over
    )
    try:
        yield server, client
    finally:
        await client.close()
        await server.stop()
        await asyncio.gather(*stopping)


async def answered(engine: FakeEngine, put: Callable[[Outputs], None]) -> None:
    await engine.came.wait()
    engine.came.clear()
    put(engine.outputs[engine.sent[-1].removeprefix("vllm-")])


async def test_over_the_wire() -> None:
    engine = FakeEngine()
    async with served(engine, hands_over=True) as (_, client):
        info = await client.start()
        assert info.handover is not None
        assert evolve(info, handover=None) == INFO
        request = evolve(make_request("p", PROMPT), handover={"do_remote_decode": True})
        answer = output(7, finish="length", handover={"do_remote_prefill": True})
        deltas, _ = await asyncio.gather(
            collect(client, request), answered(engine, lambda outputs: outputs.put(answer))
        )
        assert deltas[-1].handover == {"do_remote_prefill": True}
        assert (await client.load()).running == 1
        await client.reset_prefix_cache()
        assert engine.resets == 1


@pytest.mark.parametrize(
    ("handover", "error"), [(None, EngineError), ({"do_remote_prefill": True}, EngineHandoverError)]
)
async def test_a_failed_decode_did_not_get_the_kv(
    handover: dict[str, Any] | None, error: type[Exception]
) -> None:
    engine = FakeEngine()
    async with served(engine) as (_, client):
        await client.start()
        request = evolve(make_request("d", PROMPT), handover=handover)
        failed = output(finish="error")
        with pytest.raises(error) as caught:
            await asyncio.gather(
                collect(client, request), answered(engine, lambda outputs: outputs.put(failed))
            )
        assert type(caught.value) is error


async def test_clients_of_a_dead_engine_take_the_worker_for_lost() -> None:
    engine = FakeEngine()
    async with served(engine) as (_, client):
        await client.start()
        with pytest.raises(EngineUnavailableError):
            await asyncio.gather(
                collect(client, make_request("a", PROMPT)),
                answered(engine, lambda outputs: outputs.put(RuntimeError("EngineCore"))),
            )
        with pytest.raises(EngineUnavailableError):
            await client.start()


async def test_a_dead_engine_refuses_nobody_but_closes() -> None:
    engine = FakeEngine()
    async with served(engine) as (_, client):
        await client.start()
        engine.refusal = EngineUnavailableError("dead")
        with pytest.raises(EngineUnavailableError):
            await collect(client, make_request("a", PROMPT))


async def test_a_server_that_stops_closes_idle_connections_too() -> None:
    async with served(FakeEngine()) as (server, client):
        await client.start()
        await server.stop()
        with pytest.raises(EngineUnavailableError):
            await client.load()


class App:
    """Stands for vLLM's app: starts, waits for its shutdown, and answers everything else."""

    def __init__(self) -> None:
        self.state = SimpleNamespace()
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            self.asked.append(scope["path"])
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


@define
class Lifespan:
    """What a server does with an app that is wrapped by the middleware."""

    app: App = field(factory=App)
    received: asyncio.Queue[Any] = field(factory=asyncio.Queue)
    said: asyncio.Queue[Any] = field(factory=asyncio.Queue)

    def run(self) -> asyncio.Task[None]:
        scope = {"type": "lifespan", "app": self.app}
        self.received.put_nowait({"type": "lifespan.startup"})
        call = TokenApi(self.app)(scope, self.received.get, self.said.put)
        return asyncio.create_task(call)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that the middleware finds in the app."""
    engine = FakeEngine()

    class AsyncLlmEngine:
        @classmethod
        async def of(cls, state: Any, host: str) -> FakeEngine:
            del state, host
            return engine

    module = ModuleType("commutator_vllm.async_llm")
    module.AsyncLlmEngine = AsyncLlmEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine


async def test_the_middleware_serves_as_long_as_the_app_lives(
    loaded: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports("127.0.0.1")
    monkeypatch.setenv(LISTEN_AT, f"127.0.0.1:{port}")
    life = Lifespan()
    running = life.run()
    assert (await life.said.get())["type"] == "lifespan.startup.complete"
    client = VllmTokenClient(TokenApiAddress("http://127.0.0.1:1", f"127.0.0.1:{port}"))
    assert await client.start() == INFO
    assert loaded.sent == []
    life.received.put_nowait({"type": "lifespan.shutdown"})
    await running
    with pytest.raises(EngineUnavailableError):
        await client.load()
    await client.close()
    await TokenApi(life.app)({"type": "http", "path": "/v1/models"}, life.received.get, None)  # type: ignore[arg-type]
    assert life.app.asked == ["/v1/models"]


@pytest.mark.usefixtures("loaded")
async def test_a_port_that_is_taken_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(FakeEngine()) as (_, client):
        monkeypatch.setenv(LISTEN_AT, client.address)
        life = Lifespan()
        running = life.run()
        message = await life.said.get()
        assert message["type"] == "lifespan.startup.failed"
        assert "token API" in message["message"]
        running.cancel()


def test_both_addresses_are_in_one() -> None:
    for address in (
        TokenApiAddress("http://127.0.0.1:80", "127.0.0.1:81"),
        TokenApiAddress("https://[::1]:80", "[::1]:81"),
    ):
        assert TokenApiAddress.parse(str(address)) == address
    assert TokenApiAddress.parse("http://127.0.0.1:80") is None
