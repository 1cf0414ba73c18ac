"""Neighbours one version of the token API apart work together, and nothing is lost between them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.support import token_api_5 as old
from tests.unit.engine.test_token_api import INFO, FakeAdmin, ScriptedEngine, arrived, served

from commutator import (
    AdapterIdentity,
    Constraint,
    FinishReason,
    GenerateRequest,
    KvPrompt,
    KvRetention,
    MediaIdentity,
    SamplingParams,
    TokenDelta,
)
from commutator.engine.client import TokenApiClient
from commutator.engine.protocol import PROTOCOLS, codec_of
from commutator.errors import EngineUnavailableError, RequestError
from commutator.frames import FrameProtocol, Versions, versions_in
from commutator_engine_kit.server import TokenApiServer
from commutator_testing.engines import collect

PLAIN = GenerateRequest(
    request_id="r",
    token_ids=array("I", [1, 2, 2**32 - 1]),
    sampling=SamplingParams(max_tokens=4, stop=("x",), seed=2**40),
    cache_salt="tenant",
    priority=3,
    data_parallel_rank=1,
    generated_prefix=1,
    handover={"room": 7},
    retention=(KvRetention(priority=2),),
    traceparent="00-1-2-01",
)
SQL = AdapterIdentity(name="sql", digest="a" * 64)
NEW: dict[str, Any] = {
    "adapter": SQL,
    "constraint": Constraint(kind="regex", value="a+"),
    "media": (MediaIdentity(kind="image", digest="b" * 64, start=0, tokens=1),),
    "session": "s-1",
    "options": {"steps": 1},
    "prompt_logprobs": 0,
}


@asynccontextmanager
async def client_of_old() -> AsyncIterator[tuple[old.Server, TokenApiClient]]:
    server = old.Server()
    async with server.listening() as address:
        client = TokenApiClient(address, answer_timeout_s=5)
        await client.start()
        yield server, client
        await client.close()


@asynccontextmanager
async def server_of_new() -> AsyncIterator[tuple[ScriptedEngine, int]]:
    engine = ScriptedEngine()
    server = TokenApiServer(engine)
    port = await server.start("127.0.0.1", 0)
    yield engine, port
    await server.stop()


async def test_two_of_today_speak_the_newest() -> None:
    async with served() as (engine, server, client):
        stream = client.generate(evolve(PLAIN, constraint=NEW["constraint"], adapter=SQL))
        await arrived(engine, 1)
        (request,) = engine.requests.values()
        assert (request.constraint, request.adapter) == (NEW["constraint"], SQL)
        assert next(iter(server.connections)).known_codec.version == PROTOCOLS.newest
        engine.emit(
            [(key, TokenDelta(finish_reason=FinishReason.TOOL_CALLS)) for key in engine.requests]
        )
        assert [delta.finish_reason async for delta in stream] == ["tool_calls"]


async def test_an_old_worker_gets_what_it_knows_as_it_was() -> None:
    async with client_of_old() as (server, client):
        info = await client.start()
        assert (info.kind, info.operations, info.constraints) == ("old", ("generate",), ())
        (delta,) = await collect(client, PLAIN)
        assert (delta.token_ids, delta.finish_reason) == ((1, 2, 2**32 - 1), "length")
        (got,) = server.requests
        for name in old.Request.__annotations__:
            if name not in ("token_ids", "lora_name", "extra"):
                assert getattr(got, name) == getattr(PLAIN, name), name
        await client.kv_prefetch(KvPrompt(token_ids=[1, 2], cache_salt="s"))
        assert server.prompts == [old.Prompt(token_ids=[1, 2], cache_salt="s")]
        assert server.hellos == [["hello", 5, None]]


@pytest.mark.parametrize("name", sorted(NEW.keys() - {"session"}))
async def test_what_an_old_worker_would_not_understand_is_not_sent(name: str) -> None:
    async with client_of_old() as (server, client):
        with pytest.raises(RequestError, match=f"{name}: the worker speaks version 5") as refused:
            await collect(client, evolve(PLAIN, **{name: NEW[name]}))
        assert refused.value.param == name
        assert server.requests == []
        await collect(client, PLAIN)
        assert len(server.requests) == 1, "the connection is as good as before"


async def test_a_session_is_a_hint_that_an_old_worker_does_without() -> None:
    async with client_of_old() as (server, client):
        await collect(client, evolve(PLAIN, session=NEW["session"]))
        assert len(server.requests) == 1


async def test_nor_is_a_prompt_with_an_adapter() -> None:
    async with client_of_old() as (server, client):
        with pytest.raises(RequestError, match="adapter: the worker speaks version 5"):
            await client.kv_prefetch(KvPrompt(token_ids=[1], adapter=SQL))
        assert server.prompts == []


OLD = old.Request(
    request_id="r",
    token_ids=(),
    sampling=SamplingParams(max_tokens=4),
    cache_salt="s",
    retention=(KvRetention(pinned=True),),
    handover={"room": 1},
)


async def test_an_old_front_door_is_served_as_it_was() -> None:
    async with server_of_new() as (engine, port), old.Client.connected(port) as client:
        assert client.info is not None
        assert client.info.kind == INFO.kind
        client.protocol.send(["generate", 1, old.pack(OLD, [1, 2, 3])])
        await arrived(engine, 1)
        ((key, request),) = engine.requests.items()
        assert list(request.token_ids) == [1, 2, 3]
        assert (request.cache_salt, request.retention) == ("s", OLD.retention)
        assert request.is_plain
        engine.emit([(key, TokenDelta(token_ids=(7,), finish_reason=FinishReason.STOP))])
        frame = await client.next()
        assert frame == ["deltas", [[1, [7], {"finish": "stop"}]]]


@pytest.mark.parametrize("reason", FinishReason)
async def test_every_end_is_told_to_an_old_front_door_in_its_words(reason: FinishReason) -> None:
    async with server_of_new() as (engine, port), old.Client.connected(port) as client:
        client.protocol.send(["generate", 1, old.pack(OLD, [1])])
        await arrived(engine, 1)
        (key,) = engine.requests
        engine.emit([(key, TokenDelta(finish_reason=reason))])
        told, error = old.finish_of(await client.next())
        if reason in old.FINISH_REASONS:
            assert told == reason
        else:
            assert told == "error"
            assert f"the answer ended with {reason}" in (error or "")


async def test_an_adapter_by_name_alone_is_refused_and_options_are_checked() -> None:
    async with server_of_new() as (engine, port), old.Client.connected(port) as client:
        for changes, why in (
            ({"lora_name": "sql"}, "adapter 'sql': version 5"),
            ({"extra": {"depth": 1}}, "fake has no option 'depth'"),
            ({"extra": {"room": "x"}}, "room: expected an integer"),
        ):
            kind, key, reason, what = await client.generate(evolve(OLD, **changes), [1])
            assert (kind, key, what) == ("refused", 1, "request")
            assert why in reason
        assert engine.requests == {}
        engine.admin = FakeAdmin(engine.answered)
        failed = await client.ask("prefetch", old.Prompt(token_ids=[1], lora_name="sql"))
        assert failed[0] == "failed"
        assert "adapter 'sql'" in failed[2]
        assert (await client.ask("prefetch", old.Prompt(token_ids=[1])))[0] == "answer"
        assert engine.admin.prompts == [KvPrompt(token_ids=[1])]


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ([7, 9], "versions 7 to 9"),
        ([4, 4], "version 4"),
        ([6, 5], "no versions"),
        ("x", "no versions"),
    ],
)
async def test_without_a_common_version_it_is_said_which_there_are(theirs: Any, why: str) -> None:
    def connected() -> FrameProtocol:
        protocol = FrameProtocol(
            lambda _: protocol.send(["info", {"protocols": theirs}]), lambda _: None
        )
        return protocol

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    client = TokenApiClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", answer_timeout_s=5)
    with pytest.raises(EngineUnavailableError, match=why):
        await client.start()
    await client.close()
    server.close()


@pytest.mark.parametrize("version", [1, 4, 7, 99])
async def test_who_speaks_no_version_of_ours_learns_which_we_do(version: int) -> None:
    async with server_of_new() as (engine, port):
        frames: asyncio.Queue[Any] = asyncio.Queue()
        protocol = FrameProtocol(frames.put_nowait, lambda _: frames.put_nowait(None))
        await asyncio.get_running_loop().create_connection(lambda: protocol, "127.0.0.1", port)
        protocol.send(["hello", version, None])
        _, info = await frames.get()
        assert info["protocols"] == list(PROTOCOLS)
        protocol.send(["generate", 1, b"\xc0"])
        kind, key, reason, _ = await frames.get()
        assert (kind, key) == ("refused", 1)
        assert "versions 5 to 6" in reason
        protocol.send(["use", 99])
        assert await frames.get() is None, "that is no version to use"
        assert engine.requests == {}


SPANS = st.tuples(st.integers(1, 9), st.integers(0, 3)).map(lambda s: Versions(s[0], s[0] + s[1]))


@given(SPANS, SPANS)
def test_the_highest_common_version_is_used(mine: Versions, theirs: Versions) -> None:
    both = {*range(mine[0], mine[1] + 1)} & {*range(theirs[0], theirs[1] + 1)}
    assert mine.common(theirs) == theirs.common(mine) == max(both, default=None)
    assert versions_in(list(theirs)) == theirs


def test_every_version_of_ours_has_its_messages() -> None:
    for version in range(PROTOCOLS.oldest - 1, PROTOCOLS.newest + 2):
        codec = codec_of(version)
        spoken = PROTOCOLS.oldest <= version <= PROTOCOLS.newest
        assert (codec is not None and codec.version == version) == spoken
