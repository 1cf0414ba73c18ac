"""What a certificate allows on the wires between hosts; old instances; readers of KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from attrs import evolve
from tests.support.certificates import Authorities, on_a_network
from zmq.utils import z85

from commutator.contract.block import BlocksCleared
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import EngineInfo, EngineLoad
from commutator.engine.client import TokenApiClient
from commutator.engine.protocol import PROTOCOLS, Codec
from commutator.engine.protocol import SERVICE as TOKEN_API
from commutator.errors import EngineUnavailableError
from commutator.frames import FrameProtocol
from commutator.kv_events.curve import SERVICE as KV_EVENTS
from commutator.kv_events.zmq_bus import replay_messages
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import SERVICE as REGISTRY
from commutator.registry.server import RegistryServer
from commutator.trust import ClientGate, RunSecret, adopt, refused_connections
from commutator.trust.identity import Kind
from commutator_engine_kit import EventPublisher
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import SERVICE as EXPORTER
from commutator_engine_kit.kv.transfer.sources import Connection
from commutator_engine_kit.server import TokenApiServer, TokenEngine
from commutator_testing.registries import make_worker

OURS = RunSecret.from_text("ours")
INFO = EngineInfo(
    kind="scripted", version="1", model="m", max_model_len=64, block_size=16, kv_capacity_blocks=8
)
pytestmark = pytest.mark.security


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@pytest.fixture
def host(authorities: Authorities, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is host h1, of the run of OURS."""
    with adopt(OURS), on_a_network(monkeypatch, authorities.network("h1")):
        yield


def refused(service: str) -> int:
    return refused_connections().get(service, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


class Peer:
    """A connection with a certificate of its own."""

    def __init__(self, service: str, secret: RunSecret = OURS) -> None:
        self.got: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        gate = ClientGate(service, secret)
        self.frames = FrameProtocol(self.got.put_nowait, self.lost.set_result, gate)

    async def answer(self, *frame: Any) -> list[Any]:
        """What is answered; ["closed"] when the connection is."""
        self.frames.send(frame)
        got: asyncio.Future[Any] = asyncio.ensure_future(self.got.get())
        waiting: set[asyncio.Future[Any]] = {got, self.lost}
        async with asyncio.timeout(10):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return got.result() if got.done() else ["closed"]


@asynccontextmanager
async def peer(
    authorities: Authorities, port: int, service: str, kind: Kind, name: str
) -> AsyncIterator[Peer]:
    one = Peer(service)
    context = authorities.context(authorities.files(name, kind))
    await asyncio.get_running_loop().create_connection(
        lambda: one.frames, "127.0.0.1", port, ssl=context, server_hostname=""
    )
    try:
        yield one
    finally:
        one.frames.close()


def record(worker_id: str, host_name: str) -> Any:
    return evolve(make_worker(worker_id), host=host_name)


REGISTER = ("register", 1, record("h2-w-0", "h2"), 60.0)
OTHERS = ("register", 1, record("h3-w-0", "h3"), 60.0)
DISGUISED = ("register", 1, record("h3-w-0", "h2"), 60.0)
ELSEWHERE = ("register", 1, record("h2-w-0", "h3"), 60.0)
SIMILAR = ("register", 1, record("h22-w-0", "h2"), 60.0)
DRAIN = ("set_draining", 1, "h1-w-0", True)
ROLE = ("set_role", 1, "h1-w-0", "both")
WRITE = ("write_document", 1, "plan", b"", 0)
DELETE = ("delete_document", 1, "plan", 1)
STATE = ("run", 1)
LEASE = object()
"""Stands for the lease of ``h1-w-0``."""


@pytest.mark.parametrize(
    ("kind", "frame", "answer"),
    [
        (Kind.HOST, REGISTER, "answer"),
        (Kind.WORKER, REGISTER, "answer"),
        (Kind.WORKER, OTHERS, "failed"),
        (Kind.HOST, OTHERS, "failed"),
        (Kind.HOST, DISGUISED, "failed"),
        (Kind.HOST, ELSEWHERE, "failed"),
        (Kind.HOST, SIMILAR, "failed"),
        (Kind.HOST, ("register", 1, {"worker_id": "h2-w-0"}, 60.0), "failed"),
        (Kind.FRONTEND, REGISTER, "failed"),
        (Kind.OPERATOR, REGISTER, "failed"),
        (Kind.HOST, ("keep_alive", 1, LEASE), "failed"),
        (Kind.WORKER, ("deregister", 1, LEASE, "stopped"), "failed"),
        (Kind.HOST, DRAIN, "answer"),
        (Kind.OPERATOR, DRAIN, "answer"),
        (Kind.FRONTEND, DRAIN, "failed"),
        (Kind.WORKER, DRAIN, "failed"),
        (Kind.OPERATOR, ROLE, "answer"),
        (Kind.FRONTEND, ROLE, "failed"),
        (Kind.OPERATOR, WRITE, "answer"),
        (Kind.HOST, WRITE, "answer"),
        (Kind.FRONTEND, WRITE, "failed"),
        (Kind.WORKER, DELETE, "failed"),
        (Kind.FRONTEND, ("read_document", 1, "plan"), "answer"),
        (Kind.FRONTEND, ("watch_document", "plan"), "document"),
        (Kind.FRONTEND, STATE, "answer"),
        (Kind.WORKER, ("share", "door", 1, {}), "closed"),
        (Kind.FRONTEND, ("watch",), "snapshot"),
    ],
)
async def test_the_registry(
    host: None, authorities: Authorities, kind: Kind, frame: Any, answer: str
) -> None:
    registry = MemoryRegistry()
    server = RegistryServer(registry)
    port = int((await server.start()).rpartition(":")[2])
    lease = await server.register(record("h1-w-0", "h1"), 60.0)
    sent = [lease if part is LEASE else part for part in frame]
    before = refused(REGISTRY)
    async with peer(authorities, port, REGISTRY, kind, "h2") as one:
        assert (await one.answer(*sent))[0] == answer
    denied = answer in ("failed", "closed")
    assert refused(REGISTRY) == before + denied
    await server.stop()
    await registry.close()


class ScriptedEngine(TokenEngine):
    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self, emit: Any) -> EngineInfo:
        return INFO

    def submit(self, key: int, request: GenerateRequest) -> None:
        self.asked.append(request.request_id)

    def abort(self, key: int) -> None:
        pass

    def load(self) -> EngineLoad:
        return EngineLoad()

    def reset_prefix_cache(self) -> None:
        self.asked.append("reset")

    def stop(self) -> None:
        pass


PROMPT = Codec().pack_request(
    GenerateRequest(request_id="r", token_ids=[1], sampling=SamplingParams(max_tokens=1))
)


OPERATIONS: dict[str, tuple[Any, ...]] = {
    "reset": ("ask", 2, "reset_prefix_cache"),
    "evict": ("ask", 5, "kv", "evict", {}),
}


@pytest.mark.parametrize(
    ("kind", "name", "allowed"),
    [
        (Kind.HOST, "h2", {"hello", "load", "generate", *OPERATIONS}),
        (Kind.FRONTEND, "h2", {"hello", "load", "generate"}),
        (Kind.OPERATOR, "h2", {"hello", "load", *OPERATIONS}),
        (Kind.WORKER, "h2", set()),
        # The worker's own supervisor:
        (Kind.WORKER, "h1", {"hello", "load", "generate", *OPERATIONS}),
    ],
)
async def test_the_token_api(
    host: None, authorities: Authorities, kind: Kind, name: str, allowed: set[str]
) -> None:
    engine = ScriptedEngine()
    server = TokenApiServer(engine)
    port = await server.start("127.0.0.1", 0)
    done, before = set(), refused(TOKEN_API)
    frames = {
        "hello": ("hello", PROTOCOLS.oldest, None),
        "load": ("ask", 1, "load"),
        **OPERATIONS,
    }
    for what, frame in frames.items():
        async with peer(authorities, port, TOKEN_API, kind, name) as one:
            # Only those who may evict learn that there is nothing to evict.
            got = await one.answer(*frame)
            if got[0] in ("info", "answer") or got[-1] == "no_tiers":
                done.add(what)
    async with peer(authorities, port, TOKEN_API, kind, name) as one:
        one.frames.send(["generate", 1, PROMPT])
        await until(lambda: "r" in engine.asked or one.lost.done())
        if "r" in engine.asked:
            done.add("generate")
    assert done == allowed
    assert refused(TOKEN_API) == before + len(frames) + 1 - len(allowed)
    await server.stop()


async def test_a_worker_answers_who_means_this_instance_only() -> None:
    with adopt(OURS):
        server = TokenApiServer(ScriptedEngine(), instance="new")
        port = await server.start("127.0.0.1", 0)
        before = refused(TOKEN_API)
        for instance, answers in (("new", True), ("", True), ("old", False)):
            client = TokenApiClient(f"127.0.0.1:{port}")
            client.expect(evolve(make_worker("w-0"), instance=instance))
            if answers:
                assert await client.start() == INFO
            else:
                with pytest.raises(EngineUnavailableError, match="another worker listens there"):
                    await client.start()
            await client.close()
        assert refused(TOKEN_API) == before + 1
        await server.stop()


@pytest.mark.parametrize("known", [True, False])
async def test_lenders_of_kv_ask_for_certificates(
    host: None, authorities: Authorities, known: bool
) -> None:
    exporter = BlockExporter(lambda: None)
    address = exporter.start("127.0.0.1")
    before = refused(EXPORTER)
    if known:
        connection = Connection(address)
        await connection.start()
        await connection.close()
    else:
        one, port = Peer(EXPORTER), int(address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: one.frames, "127.0.0.1", port)
        async with asyncio.timeout(10):
            await one.lost
    assert refused(EXPORTER) == before + (not known)
    exporter.stop()


@pytest.fixture
def publisher(host: None) -> Any:
    publisher = EventPublisher()
    publisher.publish([BlocksCleared()])
    yield publisher
    publisher.close()


@pytest.fixture
def context() -> Any:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


async def test_kv_events_reach_the_readers_of_the_run(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    source, before = publisher.source, refused(KV_EVENTS)
    assert source.replay_endpoint is not None
    assert source.replay_endpoint.startswith("tcp://127.0.0.1:")
    messages = replay_messages(context, source.replay_endpoint, 0, 10, source.server_key)
    async with aclosing(messages):
        bursts = [burst async for burst in messages]
    assert [number for burst in bursts for number, _ in burst] == [0]
    assert refused(KV_EVENTS) == before


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
@pytest.mark.parametrize("who", ["another run", "no CURVE"])
async def test_kv_events_do_not_reach_who_does_not_know_the_secret(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]], who: str, kind: int
) -> None:
    """Neither live nor by a replay, also when the publisher's public key is known."""
    source, before = publisher.source, refused(KV_EVENTS)
    assert source.replay_endpoint is not None
    assert source.server_key is not None
    stranger = context.socket(kind)
    stranger.linger = 0
    if who == "another run":
        secret = z85.encode(b"x" * 32)
        stranger.curve_secretkey = secret
        stranger.curve_publickey = zmq.curve_public(secret)
        stranger.curve_serverkey = source.server_key.encode()
    if kind == zmq.SUB:
        stranger.subscribe(b"")
        stranger.connect(source.endpoint)
    else:
        stranger.connect(source.replay_endpoint)
        stranger.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
    await until(lambda: refused(KV_EVENTS) > before)
    publisher.publish([BlocksCleared()])
    assert not stranger.poll(200)
    stranger.close()


async def test_a_reader_does_not_take_events_in_plain_text_from_another_host(
    host: None, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    messages = replay_messages(context, "tcp://10.0.0.9:5557", 0, 1.0)
    with pytest.raises(ValueError, match="without encryption"):
        await anext(messages)
