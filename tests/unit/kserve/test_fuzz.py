"""Senseless messages, and streams that end at every moment: errors, no leak, no stuck place."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError
from tests.support.front_door import FakeDispatcher, answer
from tests.support.kserve import RpcDoor, infer_request, rpc_door, values_of

from commutator_kserve.messages import SERVICE

HONEST = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
SEEDS = [
    infer_request("Hi", request_id="7", temperature=0.5, stop='["x"]', max_tokens=3),
    infer_request("Hi", raw=False, streaming=True),
    infer_request(["a", "b"], outputs=["text_output"], n=2, schema="{}"),
]


def mutated(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(SEEDS).SerializeToString())
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 3:
                data[at:at] = data[at : at + draw.randint(1, 60)]
            case _:
                del data[at:]
    return bytes(data)


async def is_at_rest(door: RpcDoor) -> None:
    """Nothing is left of what was asked, and an honest request is answered."""
    services = door.http.services
    async with asyncio.timeout(10):
        while services.limiter.running or services.limiter.waiting or door.http.dispatcher.open:
            await asyncio.sleep(0.01)
        assert values_of(await door.infer("Hi"))["finish_reason"]


@pytest.mark.parametrize(
    "count",
    [pytest.param(400, id="quick"), pytest.param(10_000, id="all", marks=pytest.mark.long)],
)
@pytest.mark.security
async def test_mutated_messages_are_refused_or_answered(count: int) -> None:
    draw = random.Random(7)
    async with rpc_door() as door:
        bare = door.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        codes = set[grpc.StatusCode]()

        async def send() -> None:
            call = bare(mutated(draw))
            async with asyncio.timeout(30):
                codes.add(await call.code())

        stream = door.stream()
        reading = asyncio.ensure_future(_read(stream))
        for begin in range(0, count, 50):
            await asyncio.gather(*(send() for _ in range(begin, min(begin + 25, count))))
            for _ in range(25):
                await stream.write(mutated(draw))
        await stream.done_writing()
        async with asyncio.timeout(60):
            assert await reading > 0
        assert await stream.code() is grpc.StatusCode.OK
        assert codes <= HONEST
        assert len(codes) > 2
        await is_at_rest(door)


async def _read(stream: Any) -> int:
    count = 0
    while await stream.read() is not grpc.aio.EOF:
        count += 1
    return count


@pytest.mark.parametrize(
    "count",
    [pytest.param(60, id="quick"), pytest.param(1_000, id="all", marks=pytest.mark.long)],
)
@pytest.mark.security
async def test_streams_that_end_at_every_moment_leave_nothing(count: int) -> None:
    draw = random.Random(7)
    dispatcher = FakeDispatcher(script=answer("one two three"), delay_s=0.002)
    async with rpc_door(dispatcher, max_concurrent_requests=16) as door:

        async def one(number: int) -> None:
            stream = door.stream(timeout=draw.choice([None, 0.005, 0.02]))
            try:
                for request in range(draw.randint(0, 4)):
                    sent = infer_request("Hi", request_id=str(request), streaming=True)
                    await stream.write(sent)
                    if draw.random() < 0.3:
                        await asyncio.sleep(draw.random() * 0.01)
                if draw.random() < 0.4:
                    await stream.done_writing()
                async with asyncio.timeout(draw.random() * 0.1):
                    for _ in range(draw.randint(0, 12)):
                        if await stream.read() is grpc.aio.EOF:
                            break
                await asyncio.sleep(draw.random() * 0.01)
            except (
                grpc.aio.AioRpcError,
                TimeoutError,
                asyncio.InvalidStateError,
                ExecuteBatchError,
            ):
                pass
            stream.cancel()

        for begin in range(0, count, 20):
            async with asyncio.timeout(60):
                await asyncio.gather(*map(one, range(begin, begin + 20)))
        await is_at_rest(door)
        tasks = [one for one in asyncio.all_tasks() if "stream.py" in repr(one)]
        assert not tasks
