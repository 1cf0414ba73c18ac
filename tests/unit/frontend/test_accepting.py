"""Many connections are accepted in one turn of the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from commutator_http.connections import ConnectionTable, Listener

CLIENTS = 300


class Connections(set[asyncio.BaseTransport]):
    """Those that are open."""

    def protocol(self, _: object) -> asyncio.Protocol:
        return Kept(self)


class Kept(asyncio.Protocol):
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._transport)


@pytest.mark.security
@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_hundreds_wait_for_a_few_turns_only(make_loop: type[asyncio.AbstractEventLoop]) -> None:
    """A turn of a loop with 512 streams takes some ten milliseconds: one each makes seconds."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listening:
            clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
            table = ConnectionTable(10_000)
            connections = Connections()
            listener = Listener([listening], table, connections.protocol, None)
            listener.start()
            turns = 0
            while table.open < CLIENTS:
                await asyncio.sleep(0)
                turns += 1
            assert turns <= 20
            await asyncio.sleep(0.1)  # until their transports are made
            await listener.close()
            for client in clients:
                client.close()
            await asyncio.sleep(0.1)  # until these have seen it
            for transport in connections.copy():
                transport.close()
            await asyncio.sleep(0.1)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


def test_connections_that_are_dropped_as_they_are_accepted_are_closed() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            table = ConnectionTable(1, for_probes=0)
            connections = Connections()
            listener = Listener([listening], table, connections.protocol, None)
            clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
            listener.start()
            listener.stop()  # takes all three in one turn, and drops the first two
            for client in clients[:2]:
                client.settimeout(60)
                assert await asyncio.to_thread(client.recv, 1) == b""
            assert table.open == 1
            await listener.close()
            for client in clients:
                client.close()
            async with asyncio.timeout(60):
                while connections:
                    await asyncio.sleep(0.001)

    asyncio.run(run())
