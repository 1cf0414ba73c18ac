"""Clients of the gRPC door that do not read their answers: bounded memory, and no place is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.front_door import FakeDispatcher, answer
from tests.support.kserve import (
    ModelInferResponse,
    RpcDoor,
    infer_request,
    plain,
    rpc_door,
    values_of,
)
from tests.unit.kserve.test_rpc import rest_of

from commutator_grpc.outbox import Outbox, Unread, shut
from commutator_kserve.messages import SERVICE, message

pytestmark = pytest.mark.security

LONG = answer("An answer. " * 2_000, tokens_per_delta=6_000)
ANSWERS = 16
"""Of one request: 290 KB, more than the window of a stream."""
SLOW_READER = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
"""The window of its streams stays at 64 KiB."""


@asynccontextmanager
async def unread(
    script: Any = LONG, grpc_options: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[RpcDoor, RpcDoor]]:
    """A door, and another client of it that reads only what it has to."""
    async with (
        rpc_door(FakeDispatcher(script=script), grpc_options=grpc_options, **options) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}", options=SLOW_READER) as channel,
    ):
        yield door, RpcDoor(door.http, channel, door.port)


async def asked(reader: RpcDoor) -> Any:
    """A call whose answer waits until it is read."""
    call = reader.channel.stream_stream(f"/{SERVICE}/ModelInfer")()
    sent = infer_request("Hi", n=ANSWERS, max_tokens=5_000)
    await call.write(sent.SerializeToString())
    await call.done_writing()
    return call


async def at_rest(door: RpcDoor) -> None:
    """Until nothing is generated and every place is free."""
    async with asyncio.timeout(10):
        while door.http.dispatcher.open or door.http.services.limiter.running:
            await asyncio.sleep(0.01)


async def made(door: RpcDoor, answers: int) -> None:
    """Until so many answers are made, whoever reads them."""

    def count() -> float:
        lines = door.http.services.metrics.render().decode().splitlines()
        done = [line for line in lines if line.startswith('commutator_requests_total{code="200"')]
        return sum(float(line.rpartition(" ")[2]) for line in done)

    async with asyncio.timeout(10):
        while count() < answers:
            await asyncio.sleep(0.01)


def dropped(door: RpcDoor) -> int:
    page = door.http.services.metrics.render().decode()
    line = 'commutator_connections_dropped_total{reason="unread_answer"} '
    return int(float(page.partition(line)[2].split()[0]))


async def test_their_bytes_are_bounded_and_others_are_served() -> None:
    async with unread(grpc_options={"max_unread_bytes": 1 << 20}) as (door, reader):
        calls = [await asked(reader) for _ in range(3)]
        await made(door, 3)
        await at_rest(door)
        assert not any(call.done() for call in calls)
        calls.append(await asked(reader))  # 1.1 MB together
        async with asyncio.timeout(10):
            for call in calls:
                assert await call.code() is not grpc.StatusCode.OK
        said = await door.infer("Hi", n=ANSWERS, max_tokens=5_000)
        assert len(values_of(said)["text_output"]) == ANSWERS
        await at_rest(door)
        assert dropped(door) == 1


async def test_a_place_is_free_again_and_who_reads_late_has_the_answer() -> None:
    async with unread(grpc_options={"write_timeout_s": 0.2}, max_concurrent_requests=2) as (
        door,
        reader,
    ):
        calls = [await asked(reader) for _ in range(2)]
        await made(door, 2)
        await at_rest(door)
        assert values_of(await door.infer("Hi", max_tokens=2))["finish_reason"] == ["length"]
        for call in calls:
            said = ModelInferResponse.FromString(await call.read())
            assert values_of(said)["index"] == [*range(ANSWERS)]
            assert await call.code() is grpc.StatusCode.OK


async def test_calls_that_stay_unread_are_bounded_too() -> None:
    options = {"write_timeout_s": 0.1, "max_calls": 6}
    async with unread(grpc_options=options) as (door, reader):
        calls = [await asked(reader) for _ in range(3)]
        await made(door, 3)
        await at_rest(door)
        await asyncio.sleep(0.3)
        assert not dropped(door)
        calls.append(await asked(reader))
        async with asyncio.timeout(20):
            for call in calls:
                await call.code()
        assert dropped(door) == 1
        assert (await door.call("ServerLive")).live


async def test_a_stream_waits_for_its_reader_and_loses_nothing() -> None:
    text = "one two three four five six seven " * 500
    async with unread(answer(text, tokens_per_delta=50)) as (door, reader):
        stream = reader.stream()
        for number in range(40):
            sent = infer_request("Hi", request_id=str(number), streaming=True, max_tokens=5_000)
            await stream.write(sent)
        await stream.done_writing()
        async with asyncio.timeout(5):
            while not door.http.dispatcher.open:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert door.http.dispatcher.open  # they wait
        found = dict.fromkeys(map(str, range(40)), "")
        for one in await rest_of(stream):
            found[one.infer_response.id] += values_of(one.infer_response)["text_output"][0]
        assert set(found.values()) == {text}
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_stream_that_nobody_reads_ends_its_requests() -> None:
    options = {"write_timeout_s": 0.3}
    async with unread(answer("one two " * 2_000), grpc_options=options) as (door, reader):
        stream = reader.stream()
        for number in range(12):
            sent = infer_request("Hi", request_id=str(number), streaming=True, max_tokens=4_000)
            await stream.write(sent)
        async with asyncio.timeout(20):
            while not door.http.dispatcher.open:
                await asyncio.sleep(0.01)
            while door.http.dispatcher.open:
                await asyncio.sleep(0.01)
        await at_rest(door)
        assert await rest_of(stream)
        assert await stream.code() is grpc.StatusCode.CANCELLED


async def test_a_request_is_cancelled_while_its_stream_waits() -> None:
    """What is under way cannot be taken back; the stream goes on behind it."""
    async with unread() as (_, reader):
        stream = reader.stream()
        await stream.write(
            infer_request("Hi", request_id="a", n=ANSWERS, max_tokens=5_000, streaming=True)
        )
        await asyncio.sleep(0.5)
        cancel = message("ModelInferRequest")(id="a")
        cancel.parameters["cancel"].bool_param = True
        await stream.write(cancel)
        await stream.write(infer_request("Hi", request_id="b", max_tokens=2))
        await stream.done_writing()
        said = await rest_of(stream)
        last = {one.infer_response.id: one for one in said}
        assert values_of(last["b"].infer_response)["finish_reason"] == ["length"]
        assert plain(last["a"].infer_response.parameters)["triton_final_response"]
        assert await stream.code() is grpc.StatusCode.OK


def test_only_the_connection_that_is_meant_is_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        clients = [socket.create_connection(server.getsockname()) for _ in range(2)]
        accepted = [server.accept()[0] for _ in range(2)]
        before = len([*Path("/dev/fd").iterdir()])
        host, port = clients[0].getsockname()
        assert shut(f"ipv4:{host}:{port}")
        assert clients[0].recv(1) == b""
        clients[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[1].recv(1)
        for other in ("unix:/x", f"ipv4:{host}:1", f"ipv6:%5B::1%5D:{port}", "ipv4:x"):
            assert not shut(other)
        assert len([*Path("/dev/fd").iterdir()]) == before
        for one in (*clients, *accepted):
            one.close()


class Context:
    """Of a call whose client reads when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads = asyncio.Event()

    def peer(self) -> str:
        return self.name

    async def write(self, data: bytes) -> None:
        await self.reads.wait()


async def test_the_bytes_of_all_are_counted_and_given_back() -> None:
    unread_ = Unread(1_000, 10, 0.05)
    contexts = [Context(f"unix:{number}") for number in range(3)]
    boxes = [Outbox(unread_, context) for context in contexts]
    for box in boxes[:2]:
        await box.write(b"x" * 400)
    await asyncio.sleep(0)
    assert unread_.held_bytes == 800
    await boxes[2].write(b"x" * 400)  # the oldest has to go
    assert unread_.held_bytes == 800
    with pytest.raises(ConnectionError):
        await boxes[0].write(b"y")
    async with asyncio.timeout(5):
        while unread_.stuck < 2:
            await asyncio.sleep(0.01)
    for context in contexts:
        context.reads.set()
    for box in boxes:
        await box.settle()
    assert (unread_.held_bytes, unread_.stuck) == (0, 0)
