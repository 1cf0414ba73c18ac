"""A network that drops every packet of a connection: what is published comes by another one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from attrs import evolve

from commutator.contract.block import BlocksCleared
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator_engine_kit import EventPublisher

IN_TIME_S = 8.0
"""3 s until the silence counts, a second for each attempt, and time for a loaded machine."""


class Router:
    """Passes connections on to a port, until it forgets those that there are: no end reaches them.

    So do routers that restart. Packets that a network drops for some time look the same meanwhile.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing: set[asyncio.Task[None]] = set()
        self.forgotten: list[asyncio.StreamWriter] = []
        self._known: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1")
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._known += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._passing.add(asyncio.create_task(self._pass_on(source, sink)))

    @staticmethod
    async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)

    async def forget(self) -> None:
        self.forgotten, self._known = self._known, []
        await self._end()

    async def close(self) -> None:
        self._server.close()
        for writer in (*self._known, *self.forgotten):
            writer.transport.abort()
        await self._end()

    async def _end(self) -> None:
        passing, self._passing = self._passing, set()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def test_a_connection_that_went_silent_is_left() -> None:
    publisher, bus = EventPublisher(), ZmqEventBus()
    port = int(publisher.source.endpoint.rpartition(":")[2])
    router = Router(port)
    endpoint = f"tcp://127.0.0.1:{await router.start()}"
    channel = bus.subscribe(evolve(publisher.source, endpoint=endpoint), print)
    try:
        await asyncio.wait_for(channel.missed(), IN_TIME_S)
        await router.forget()
        await asyncio.wait_for(channel.missed(), IN_TIME_S)  # is connected again
        receiving = asyncio.create_task(channel.receive())
        async with asyncio.timeout(IN_TIME_S):
            while not receiving.done():  # a subscription takes a moment
                publisher.publish([BlocksCleared()])
                await asyncio.wait([receiving], timeout=0.05)
        assert await receiving
    finally:
        await channel.close()
        await bus.close()
        publisher.close()
        await router.close()
