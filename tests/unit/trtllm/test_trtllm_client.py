"""The client against the stand-in, healthy and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from attrs import evolve
from tests.support.trtllm.fake_source import FakeSource, sidecar_of
from tests.support.trtllm.server import StandIn

from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator_trtllm.client import TrtllmClient

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=3)
)
WORDS = {"disagg_request_id": 1 << 62, "ctx_request_id": 1 << 62}


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest_asyncio.fixture
async def pair(source: FakeSource) -> AsyncIterator[tuple[TrtllmClient, StandIn]]:
    async with sidecar_of(source) as (client, stand_in, _):
        await client.start()
        yield client, stand_in


@pytest.fixture
def client(pair: tuple[TrtllmClient, StandIn]) -> TrtllmClient:
    return pair[0]


@pytest.fixture
def server(pair: tuple[TrtllmClient, StandIn]) -> StandIn:
    return pair[1]


async def collect(client: TrtllmClient, request: GenerateRequest = REQUEST) -> list[TokenDelta]:
    async with aclosing(client.generate(request)) as stream:
        return [delta async for delta in stream]


async def tokens(client: TrtllmClient, request: GenerateRequest = REQUEST) -> list[int]:
    return [token for delta in await collect(client, request) for token in delta.token_ids]


async def test_learns_what_the_server_is(client: TrtllmClient) -> None:
    info = await client.start()
    assert (info.kind, info.version, info.model) == ("trtllm", "1.3.0+stand.in", "stand-in")
    assert (info.max_model_len, info.block_size, info.kv_capacity_blocks) == (64, 4, 9)
    assert info.kv_events is not None
    assert info.kv_events.endpoint.startswith("tcp://127.0.0.1:")
    assert info.handover is not None
    assert await client.start() is info
    await client.check_health()


async def test_tokens_come_with_what_was_cached(client: TrtllmClient) -> None:
    deltas = await collect(client)
    assert [token for delta in deltas for token in delta.token_ids] == [10, 11, 12]
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].cached_tokens == 4


async def test_logprobs_are_those_of_the_chosen_tokens(client: TrtllmClient) -> None:
    asked = evolve(REQUEST, sampling=SamplingParams(max_tokens=3, top_logprobs=0))
    entries = [entry for delta in await collect(client, asked) for entry in delta.logprobs]
    assert [(entry.token_id, entry.logprob, entry.top) for entry in entries] == [
        (token, -0.5, ()) for token in (10, 11, 12)
    ]


async def test_what_cannot_be_is_refused(client: TrtllmClient, server: StandIn) -> None:
    with pytest.raises(RequestError, match="too long"):
        await collect(client, evolve(REQUEST, token_ids=[1] * 101))
    asked = len(server.bodies)
    with pytest.raises(RequestError, match="trtllm has no option 'of_tomorrow'; it has top_p_min"):
        await collect(client, evolve(REQUEST, options={"of_tomorrow": 1}))
    with pytest.raises(RequestError, match="cache_salt"):
        await collect(client, evolve(REQUEST, cache_salt="t"))
    assert len(server.bodies) == asked, "a salted prompt is not even sent"


@pytest.mark.parametrize(
    ("status", "healthy", "kind"),
    [
        (400, True, RequestError),
        (429, True, EngineOverloadedError),
        (503, True, EngineOverloadedError),
        (503, False, EngineUnavailableError),
        (500, True, EngineError),
        (500, False, EngineUnavailableError),
    ],
)
async def test_full_dead_and_wrong_are_different_errors(
    client: TrtllmClient, server: StandIn, status: int, healthy: bool, kind: type[Exception]
) -> None:
    server.refuses, server.healthy = (status, "because"), healthy
    with pytest.raises(kind, match="because") as caught:
        await collect(client)
    assert type(caught.value) is kind


async def test_a_stream_that_breaks_off(client: TrtllmClient, source: FakeSource) -> None:
    source.fails = EngineError("out of memory")
    stream = client.generate(REQUEST)
    assert (await anext(stream)).token_ids == (10,)
    with pytest.raises(EngineUnavailableError):
        await anext(stream)
    source.fails = None
    await client.start()
    assert await tokens(client) == [10, 11, 12]


async def test_closing_a_stream_aborts_the_request(
    client: TrtllmClient, source: FakeSource
) -> None:
    source.hangs = True
    stream = client.generate(REQUEST)
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(60):
        await source.aborted.wait()
    assert [delta async for delta in stream] == []


async def test_closing_the_client_ends_its_streams(
    client: TrtllmClient, source: FakeSource
) -> None:
    source.hangs = True
    stream = client.generate(REQUEST)
    await anext(stream)
    await client.close()
    with pytest.raises(EngineUnavailableError):
        await anext(stream)
    async with asyncio.timeout(60):
        await source.aborted.wait()


async def test_the_legs_of_a_request(client: TrtllmClient, server: StandIn) -> None:
    number = (1 << 62) + 1
    words = {"request_type": "context_only", "disagg_request_id": number}
    (last,) = await collect(client, evolve(REQUEST, handover=words))
    assert last.token_ids == (10,)
    assert last.handover is not None
    assert (last.handover["ctx_request_id"], last.handover["encoded_opaque_state"]) == (
        number,
        "AAEC",
    )
    leg = evolve(REQUEST, handover={**last.handover, "request_type": "generation_only"})
    assert await tokens(client, leg) == [10, 11, 12]
    assert server.bodies[-1]["disaggregated_params"] == leg.handover


async def test_a_decode_leg_that_did_not_get_the_kv(
    client: TrtllmClient, server: StandIn, source: FakeSource
) -> None:
    """A healthy server ends the stream early or answers 400; a dead one is unavailable."""
    leg = evolve(REQUEST, handover={"request_type": "generation_only", **WORDS})
    source.transfers = False
    with pytest.raises(EngineHandoverError):
        await collect(client, leg)
    server.refuses = (400, "transfer failed")
    with pytest.raises(EngineHandoverError, match="transfer failed"):
        await collect(client, leg)
    server.refuses = (429, "full")
    with pytest.raises(EngineOverloadedError):
        await collect(client, leg)
    server.refuses, server.healthy = None, False
    with pytest.raises(EngineUnavailableError):
        await collect(client, leg)


async def test_a_clients_own_request_goes_as_it_came(client: TrtllmClient, server: StandIn) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    async with client.forward("/v1/chat/completions", body, {}) as answer:
        text = b"".join([data async for data in answer.chunks()])
    assert answer.status == 200
    assert b"<10><11>" in text
    server.refuses = (400, "bad schema")
    async with client.forward("/v1/chat/completions", body, {}) as answer:
        assert answer.status == 400
    server.refuses = (429, "full")
    with pytest.raises(EngineOverloadedError):
        async with client.forward("/v1/chat/completions", body, {}):
            pass


async def test_a_sidecar_that_is_not_there() -> None:
    client = TrtllmClient("http://127.0.0.1:9")
    for ask in (client.start, client.load, client.check_health):
        with pytest.raises(EngineUnavailableError):
            await ask()
    with pytest.raises(EngineUnavailableError, match="not connected"):
        await collect(client)
    with pytest.raises(EngineUnavailableError, match="not connected"):
        async with client.forward("/v1/completions", b"{}", {}):
            pass
    await client.close()
