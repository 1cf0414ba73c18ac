"""While a stream says nothing, its connection is kept alive by HTTP/2's pings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from attrs import define
from tests.support.front_door import FakeDispatcher, answer
from tests.support.kserve import ModelStreamInferResponse, RpcDoor, infer_request, plain, rpc_door

from commutator_kserve.messages import SERVICE

_PING = 6
_ACK = 1
_HEAD = 9


@define
class Wire:
    """What is between a client and a gRPC door."""

    port: int = 0
    pings: int = 0
    """That the door sent by itself."""

    async def relay(
        self, door: RpcDoor, client: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        server, back = await asyncio.open_connection("127.0.0.1", door.port)

        async def asked() -> None:
            while data := await client.read(1 << 16):
                back.write(data)

        async def answered() -> None:
            with suppress(asyncio.IncompleteReadError):
                while True:
                    head = await server.readexactly(_HEAD)
                    self.pings += head[3] == _PING and not head[4] & _ACK
                    to.write(head + await server.readexactly(int.from_bytes(head[:3], "big")))

        try:
            await asyncio.wait(
                [asyncio.create_task(asked()), asyncio.create_task(answered())],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            back.close()
            to.close()


@asynccontextmanager
async def wire_to(door: RpcDoor) -> AsyncIterator[Wire]:
    wire = Wire()
    server = await asyncio.start_server(
        lambda reader, writer: wire.relay(door, reader, writer), "127.0.0.1"
    )
    async with server:
        wire.port = server.sockets[0].getsockname()[1]
        yield wire


@pytest.mark.parametrize(("ping_s", "least", "most"), [(0.2, 3, 100), (60.0, 0, 2)])
async def test_a_silent_stream_is_pinged(ping_s: float, least: int, most: int) -> None:
    dispatcher = FakeDispatcher(script=answer("late"), delay_s=1.5)
    async with (
        rpc_door(dispatcher, grpc_options={"ping_s": ping_s}) as door,
        wire_to(door) as wire,
        grpc.aio.insecure_channel(f"127.0.0.1:{wire.port}") as channel,
    ):
        stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=ModelStreamInferResponse.FromString,
        )()
        await stream.write(infer_request("Hi", streaming=True))
        await asyncio.sleep(0.2)  # beginnings ask for the round trip's time by pings, too
        before = wire.pings
        said = await stream.read()
        assert not said.error_message
        assert least <= wire.pings - before <= most
        while not plain(said.infer_response.parameters)["triton_final_response"]:
            said = await stream.read()
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK
