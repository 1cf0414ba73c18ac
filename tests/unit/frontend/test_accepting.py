"""Many connections are accepted in one turn of the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from commutator_openai.connections import ConnectionTable, Listener

CLIENTS = 300


@pytest.mark.security
@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_hundreds_wait_for_a_few_turns_only(make_loop: type[asyncio.AbstractEventLoop]) -> None:
    """A turn of a loop with 512 streams takes some ten milliseconds: one each makes seconds."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listening:
            clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
            table = ConnectionTable(10_000)
            listener = Listener([listening], table, lambda _: asyncio.Protocol(), None)
            listener.start()
            turns = 0
            while table.open < CLIENTS:
                await asyncio.sleep(0)
                turns += 1
            assert turns <= 20
            await listener.close()
            for client in clients:
                client.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())
