"""The token API over a real socket: streams, refusals, aborts, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.fault_proxy import Fault, FaultProxy

from commutator import AdapterIdentity, Constraint, OptionType, RequestOption
from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from commutator.contract.worker import (
    BlockExplanation,
    EngineInfo,
    EngineLoad,
    EventSource,
    HeldBlock,
    KvPrompt,
    PromptExplanation,
    TierContents,
)
from commutator.engine import client as client_module
from commutator.engine.client import LOST_AFTER_S, VANISHED_AFTER_S, TokenApiClient
from commutator.engine.protocol import PROTOCOLS
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    EngineWithoutTiersError,
    RequestError,
)
from commutator.frames import FrameProtocol
from commutator_engine_kit.kv.admin import KvAdmin
from commutator_engine_kit.server import Emit, TokenApiServer, TokenEngine

INFO = EngineInfo(
    kind="fake",
    version="1",
    model="m",
    max_model_len=128,
    block_size=16,
    kv_capacity_blocks=8,
    kv_events=EventSource(endpoint="tcp://127.0.0.1:1"),
    adapters=True,
    constraints=("regex",),
    request_options={"room": RequestOption(type=OptionType.INTEGER)},
)
GREETING = {**msgspec.to_builtins(INFO), "protocols": PROTOCOLS}


EXPLANATION = PromptExplanation(
    prompt_tokens=3,
    block_size=2,
    blocks=(
        BlockExplanation(
            key="ab",
            held=(HeldBlock(name="dram", state="leaving"),),
            reusable=False,
            tier=None,
            reason="dram: leaving",
        ),
    ),
)


class FakeAdmin(KvAdmin):
    """Answers slowly or wrongly, and records the questions."""

    def __init__(self, answered: threading.Event) -> None:
        self._answered = answered
        self.prompts: list[KvPrompt] = []
        self.peers: Sequence[str] = ()

    def contents(self) -> list[TierContents]:
        raise ZeroDivisionError("oops")

    def evict(self, tier: str | None = None) -> Mapping[str, int]:
        assert self._answered.wait(5)
        return {str(tier): 7}

    def explain(self, prompt: KvPrompt) -> PromptExplanation:
        self.prompts.append(prompt)
        return EXPLANATION

    def prefetch(self, prompt: KvPrompt) -> None:
        self.prompts.append(prompt)

    def set_peers(self, addresses: Sequence[str]) -> None:
        self.peers = addresses


class ScriptedEngine(TokenEngine):
    """Emits only the deltas that a test gives it."""

    def __init__(self) -> None:
        self.requests: dict[int, GenerateRequest] = {}
        self.emit: Emit = lambda deltas: None
        self.answered = threading.Event()
        self.admin: KvAdmin | None = None
        self.slow = False
        self.aborted: list[int] = []
        self.may_submit = threading.Event()
        self.may_submit.set()

    def start(self, emit: Emit) -> EngineInfo:
        self.emit = emit
        return INFO

    def takes_long(self, request: GenerateRequest) -> bool:
        return self.slow

    def submit(self, key: int, request: GenerateRequest) -> None:
        assert self.may_submit.wait(5)
        match request.request_id:
            case "impossible":
                raise RequestError("it can never fit")
            case "full":
                raise EngineOverloadedError("the queue is full")
            case "buggy":
                raise ZeroDivisionError("oops")
        self.requests[key] = request

    def abort(self, key: int) -> None:
        self.requests.pop(key, None)
        self.aborted.append(key)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.requests), kv_capacity_blocks=8)

    def reset_prefix_cache(self) -> None:
        pass

    @property
    def kv_admin(self) -> KvAdmin | None:
        return self.admin

    def stop(self) -> None:
        pass


def request(request_id: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4, logit_bias={5: -1.0}, stop=("x",), seed=2**40)
    return GenerateRequest(
        request_id=request_id,
        token_ids=array("I", [1, 2, 3]),
        sampling=sampling,
        options={"room": 2**63 - 1},
        constraint=Constraint(kind="regex", value="a+", after=(7,)),
        adapter=AdapterIdentity(name="sql", digest="a" * 64),
        session="s-1",
    )


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[ScriptedEngine, TokenApiServer, TokenApiClient]]:
    engine = ScriptedEngine()
    server = TokenApiServer(engine)
    port = await server.start("127.0.0.1", 0)
    client = TokenApiClient(f"127.0.0.1:{port}", answer_timeout_s=2)
    try:
        assert await client.start() == INFO
        yield engine, server, client
    finally:
        await client.close()
        await server.stop()


async def arrived(engine: ScriptedEngine, count: int) -> None:
    async with asyncio.timeout(2):
        while len(engine.requests) != count:
            await asyncio.sleep(0.005)


async def collect(stream: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    return [delta async for delta in stream]


async def test_a_request_arrives_whole_and_its_deltas_come_back() -> None:
    async with served() as (engine, _, client):
        stream = client.generate(request("a"))
        await arrived(engine, 1)
        (key,) = engine.requests
        assert engine.requests[key] == request("a")
        first = TokenDelta(
            token_ids=(7,),
            logprobs=(TokenLogprob(token_id=7, logprob=-0.5, top=((7, -0.5), (9, -1.5))),),
            cached_tokens=2,
        )
        engine.emit([(key, first)])
        assert await anext(stream) == first
        last = TokenDelta(token_ids=(8, 9), finish_reason=FinishReason.STOP, stop_reason="x")
        engine.emit([(key, last)])
        assert await collect(stream) == [last]


async def test_deltas_that_pile_up_are_merged() -> None:
    async with served() as (engine, _, client):
        stream = client.generate(request("a"))
        await arrived(engine, 1)
        (key,) = engine.requests
        for token in (1, 2, 3):
            engine.emit(
                [(key, TokenDelta(token_ids=(token,), cached_tokens=0 if token == 1 else None))]
            )
        engine.emit([(key, TokenDelta(token_ids=(4,), finish_reason=FinishReason.LENGTH))])
        await asyncio.sleep(0.1)
        merged = TokenDelta(
            token_ids=(1, 2, 3, 4), cached_tokens=0, finish_reason=FinishReason.LENGTH
        )
        assert await collect(stream) == [merged]


async def test_one_tick_is_one_frame_for_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (engine, _, client):
        streams = [client.generate(request(str(i))) for i in range(5)]
        await arrived(engine, 5)
        frames: list[Sequence[object]] = []
        assert client._session is not None
        handle = client._session._on_frame

        def count(frame: list[object]) -> None:
            frames.append(frame)
            handle(frame)

        monkeypatch.setattr(client._session.frames, "_on_frame", count)
        done = TokenDelta(token_ids=(1,), finish_reason=FinishReason.STOP)
        engine.emit([(key, done) for key in engine.requests])
        for stream in streams:
            assert await collect(stream) == [done]
        assert len(frames) == 1


@pytest.mark.parametrize(
    ("request_id", "error"),
    [("impossible", RequestError), ("full", EngineOverloadedError), ("buggy", EngineError)],
)
@pytest.mark.parametrize("slow", [False, True])
async def test_refusals_keep_their_kind(
    request_id: str, error: type[Exception], slow: bool
) -> None:
    async with served() as (engine, _, client):
        engine.slow = slow
        with pytest.raises(error):
            await anext(client.generate(request(request_id)))
        stream = client.generate(request("still-usable"))
        await stream.aclose()


async def test_requests_that_take_long_hold_up_nothing() -> None:
    async with served() as (engine, _, client):
        engine.slow = True
        engine.may_submit.clear()
        streams = [client.generate(request(name)) for name in ("a", "given up")]
        async with asyncio.timeout(10):
            while (await client.load()).waiting != 2:  # it answers
                await asyncio.sleep(0.005)
        await streams[1].aclose()
        async with asyncio.timeout(10):
            while engine.aborted != [2]:
                await asyncio.sleep(0.005)
        engine.may_submit.set()
        async with asyncio.timeout(10):
            while engine.aborted != [2, 2]:  # once more, as it was submitted meanwhile
                await asyncio.sleep(0.005)
        await arrived(engine, 1)
        assert (await client.load()).waiting == 0
        done = TokenDelta(token_ids=(1,), finish_reason=FinishReason.STOP)
        engine.emit([(1, done)])
        assert await collect(streams[0]) == [done]


async def test_too_many_requests_that_take_long_are_an_overload() -> None:
    async with served() as (engine, _, client):
        engine.slow = True
        engine.may_submit.clear()
        streams = [client.generate(request(str(number))) for number in range(257)]
        with pytest.raises(EngineOverloadedError, match="256 requests are prepared"):
            await anext(streams[-1])
        for stream in streams:
            await stream.aclose()
        engine.may_submit.set()


@pytest.mark.parametrize(("refused", "kind"), [(False, EngineError), (True, RequestError)])
async def test_an_error_delta_raises(refused: bool, kind: type[Exception]) -> None:
    async with served() as (engine, _, client):
        stream = client.generate(request("a"))
        await arrived(engine, 1)
        (key,) = engine.requests
        why = FinishReason.ERROR
        engine.emit([(key, TokenDelta(finish_reason=why, error="no memory", refused=refused))])
        with pytest.raises(kind, match="no memory"):
            await anext(stream)


async def test_closing_a_stream_aborts_in_the_engine() -> None:
    async with served() as (engine, _, client):
        stream = client.generate(request("a"))
        await arrived(engine, 1)
        await stream.aclose()
        await stream.aclose()
        await arrived(engine, 0)
        assert await collect(stream) == []


async def test_a_lost_client_aborts_all_its_requests() -> None:
    async with served() as (engine, _, client):
        for i in range(3):
            client.generate(request(str(i)))
        other = TokenApiClient(client.address)
        await other.start()
        other.generate(request("other"))
        await arrived(engine, 4)
        await client.close()
        await arrived(engine, 1)
        assert next(iter(engine.requests.values())).request_id == "other"
        await other.close()


async def test_a_lost_worker_fails_every_stream_at_once() -> None:
    async with served() as (engine, server, client):
        streams = [client.generate(request(str(i))) for i in range(3)]
        await arrived(engine, 3)
        await server.stop()
        for stream in streams:
            with pytest.raises(EngineUnavailableError, match="connection lost"):
                await asyncio.wait_for(anext(stream), 1)
        with pytest.raises(EngineUnavailableError):
            await client.start()


@pytest.mark.security
async def test_a_dropped_connection_is_made_anew_once_and_cuts_nothing_else() -> None:
    async with served() as (engine, _, direct):
        with FaultProxy(int(direct.address.rpartition(":")[2])) as proxy:
            client = TokenApiClient(f"127.0.0.1:{proxy.port}")
            await client.start()
            await asyncio.to_thread(proxy.set, Fault())  # ends every connection
            with pytest.raises(EngineUnavailableError):
                await anext(client.generate(request("lost")))
            connections = proxy.connections
            answers = await asyncio.gather(
                client.start(), client.load(), client.start(), client.handover_statistics()
            )
            assert answers[0] == answers[2] == INFO
            assert proxy.connections == connections + 1
            stream = client.generate(request("a"))
            await arrived(engine, 1)
            await asyncio.gather(*(client.start() for _ in range(3)))
            done = TokenDelta(token_ids=(1,), finish_reason=FinishReason.STOP)
            engine.emit([(key, done) for key in engine.requests])
            assert await collect(stream) == [done]
            await client.close()


async def pinged(client: TokenApiClient, times: int, *, answered: bool = True) -> None:
    """Ping by hand, and wait for each answer: real time decides nothing."""
    session = client._session
    assert session is not None
    for _ in range(times):
        session._heard = False
        session._turns = -1
        session.ping(3600.0)
        async with asyncio.timeout(10):
            while answered and session.unanswered_pings:
                await asyncio.sleep(0.001)


async def test_a_silent_worker_is_doubted_and_lost_when_its_host_acknowledges_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when its host vanishes: its end of the connection stays open."""
    answers = True

    def connected() -> FrameProtocol:
        def answer(frame: list[Any]) -> None:
            if answers:
                protocol.send(["info", GREETING] if frame[0] == "hello" else ["pong"])

        protocol = FrameProtocol(answer, lambda _: None)
        return protocol

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    client = TokenApiClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    seen: list[bool] = []
    client.watch_answers(lambda: seen.append(client.answers))
    await client.start()
    await pinged(client, 9)
    answers = False
    stream = client.generate(request("a"))
    await pinged(client, 1, answered=False)
    assert not seen  # the answer may be on its way
    await pinged(client, 20, answered=False)  # on this host, where its agent sees to it
    assert seen == [False]
    answers = True
    await pinged(client, 1)
    assert seen == [False, True]
    answers = False
    monkeypatch.setattr(client_module, "unacknowledged_s", lambda _: 3600.0)
    await pinged(client, 3, answered=False)
    with pytest.raises(EngineUnavailableError, match="its host acknowledges nothing"):
        async with asyncio.timeout(10):
            await anext(stream)
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailableError, match="answers no pings"):
            await client.start()  # at once, though the new connection is not answered either
        with pytest.raises(EngineUnavailableError, match="answers no pings"):
            await client.start()
        await client.close()
    server.close()


async def test_a_worker_that_answers_again_is_connected_again() -> None:
    async with served() as (_, _, client):
        await pinged(client, 1)
        session = client._session
        assert session is not None
        session.silent = True
        session.frames.abort("as after pings without answers")
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await client.start() == INFO
                    break
                except EngineUnavailableError:
                    await asyncio.sleep(0.01)


async def test_who_waits_for_a_connection_is_not_cancelled_with_it() -> None:
    """As when the lease of a worker lapses while a request is about to be sent to it."""
    server = await asyncio.get_running_loop().create_server(
        lambda: FrameProtocol(lambda _: None, lambda _: None), "127.0.0.1", 0
    )
    client = TokenApiClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    waiting = asyncio.create_task(client.start())
    async with asyncio.timeout(10):
        while client._connecting is None:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineUnavailableError, match="the client was closed"):
            await waiting
    server.close()


async def test_workers_answer_pings_and_streams_go_on() -> None:
    async with served() as (engine, _, client):
        stream = client.generate(request("a"))
        await arrived(engine, 1)
        await pinged(client, 9)
        (key,) = engine.requests
        engine.emit([(key, TokenDelta(token_ids=(1,), finish_reason=FinishReason.STOP))])
        assert len(await collect(stream)) == 1


async def test_who_is_heard_or_idle_is_not_pinged() -> None:
    async with served() as (_, _, client):
        session = client._session
        assert session is not None
        session._turns, session._heard = 0, False
        session.ping(3600.0)  # idle
        assert session.unanswered_pings == 0
        stream = client.generate(request("a"))
        session._heard = True
        session.ping(3600.0)
        assert session.unanswered_pings == 0
        session.ping(3600.0)
        assert session.unanswered_pings == 1
        await stream.aclose()


def test_a_lost_host_is_noticed_as_soon_as_the_docs_promise() -> None:
    assert VANISHED_AFTER_S <= 2.2
    assert LOST_AFTER_S <= 3.5


async def test_a_worker_of_another_host_that_answers_no_pings_is_lost() -> None:
    """As when all of that host is paused, though its system acknowledges what comes."""
    async with served() as (_, _, client):
        session = client._session
        assert session is not None
        session._lost_pings = 6
        stream = client.generate(request("a"))
        await pinged(client, 7, answered=False)
        with pytest.raises(EngineUnavailableError, match="answers no pings"):
            async with asyncio.timeout(10):
                await anext(stream)


async def test_the_load_is_told_while_a_request_runs() -> None:
    async with served() as (engine, _, client):
        running = client.generate(request("a"))
        await arrived(engine, 1)
        assert await client.load() == EngineLoad(running=1, kv_capacity_blocks=8)
        (key,) = engine.requests
        engine.emit([(key, TokenDelta(token_ids=(1,), finish_reason=FinishReason.STOP))])
        assert len(await collect(running)) == 1


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    client = TokenApiClient("127.0.0.1:1")
    with pytest.raises(EngineUnavailableError, match=r"127\.0\.0\.1:1"):
        await client.start()
    with pytest.raises(EngineUnavailableError):
        await anext(client.generate(request("a")))


async def test_invalid_frames_end_the_connection_not_the_server() -> None:
    async with served() as (_, _, client):
        host, port = client.address.split(":")
        for rubbish in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01", b"\0\0\0\2\x91\xa0"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(rubbish)
            assert await asyncio.wait_for(reader.read(), 2) == b""
            writer.close()
        await client.load()


@contextlib.asynccontextmanager
async def client_of(answer: Callable[[list[Any]], list[Any] | None]) -> AsyncIterator[Any]:
    """A client of a worker that greets properly, and then answers each frame so; None: not."""

    def connected() -> FrameProtocol:
        def on_frame(frame: list[Any]) -> None:
            answered = None
            if frame[0] == "hello":
                answered = ["info", GREETING]
            elif frame[0] != "use":
                answered = answer(frame)
            if answered is not None:
                protocol.send(answered)

        protocol = FrameProtocol(on_frame, lambda _: None)
        return protocol

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = TokenApiClient(address, answer_timeout_s=60.0)
    try:
        await client.start()
        yield client
    finally:
        await client.close()
        server.close()


@pytest.mark.security
@pytest.mark.parametrize(
    "wrong",
    [
        ["deltas", 7],
        ["deltas", [[1, [2]]]],
        ["deltas", [[1, [2], [3]]]],
        ["deltas", [[1, [2], {"finish": "never"}]]],
        ["deltas", [[1, [2], {"logprobs": 5}]]],
        ["deltas", [[{}, [2], None]]],
        ["refused", [], "reason", "engine"],
        ["answer", [], 1],
        ["failed", {}, "reason", "engine"],
    ],
    ids=str,
)
async def test_a_worker_that_sends_a_wrong_frame_is_lost_and_says_why(
    wrong: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(lambda frame: wrong if frame[0] == "generate" else None) as client:
        with pytest.raises(EngineUnavailableError, match=f"sent a wrong '{wrong[0]}' frame"):
            async with asyncio.timeout(60):
                await anext(client.generate(request("a")))
        assert await client.start() == INFO, "and connected again"
    assert "Fatal error" not in caplog.text


@pytest.mark.security
@pytest.mark.parametrize("value", [None, 7, "much", [1]], ids=str)
async def test_an_answer_of_another_type_is_an_error_of_the_worker(value: Any) -> None:
    async with client_of(lambda frame: ["answer", frame[1], value]) as client:
        for question in (
            client.load,
            client.handover_statistics,
            client.refused_connections,
            client.kv_statistics,
            client.kv_contents,
        ):
            with pytest.raises(EngineError, match=r"worker at .*Expected"):
                await question()


async def test_a_slow_answer_about_tiers_holds_up_nothing() -> None:
    async with served() as (engine, _, client):
        engine.admin = FakeAdmin(engine.answered)
        slow = asyncio.create_task(client.kv_evict("nvme"))
        assert (await client.load()).kv_capacity_blocks == 8
        assert not slow.done()
        engine.answered.set()
        assert await slow == {"nvme": 7}


async def test_an_engine_without_tiers_says_so() -> None:
    async with served() as (_, _, client):
        with pytest.raises(EngineWithoutTiersError):
            await client.kv_statistics()


async def test_a_question_about_tiers_fails_alone() -> None:
    async with served() as (engine, _, client):
        engine.admin = FakeAdmin(engine.answered)
        with pytest.raises(EngineError, match="ZeroDivisionError: oops"):
            await client.kv_contents()
        assert (await client.load()).running == 0


@pytest.mark.parametrize(
    ("question", "argument", "message"),
    [
        ("dance", None, "unknown question 'dance'"),
        ("explain", {}, "the argument of 'explain' is wrong"),
        ("verify", 3, "the argument of 'verify' is wrong"),
    ],
)
async def test_a_question_about_tiers_that_makes_no_sense_is_refused(
    question: str, argument: Any, message: str
) -> None:
    async with served() as (engine, _, client):
        engine.admin = FakeAdmin(engine.answered)
        with pytest.raises(EngineError, match=message):
            await client._ask(object, "kv", question, argument)


async def test_questions_and_answers_about_tiers_arrive_whole() -> None:
    async with served() as (engine, _, client):
        engine.admin = admin = FakeAdmin(engine.answered)
        prompt = KvPrompt(
            token_ids=[1, 2, 3], cache_salt="s", adapter=AdapterIdentity(name="l", digest="a" * 64)
        )
        assert await client.kv_explain(prompt) == EXPLANATION
        await client.kv_prefetch(prompt)
        assert admin.prompts == [prompt, prompt]
        await client.set_peers(("tcp://h:1",))
        assert admin.peers == ["tcp://h:1"]


async def test_an_answer_about_tiers_is_not_waited_for_forever() -> None:
    async with served() as (engine, _, client):
        engine.admin = FakeAdmin(engine.answered)
        with pytest.raises(EngineUnavailableError, match=r"no answer within 0\.05 s"):
            await client.kv_evict(timeout_s=0.05)
        engine.answered.set()
