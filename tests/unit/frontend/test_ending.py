"""A stream that fails while its client does not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door

from commutator_http import call as ending

BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
PATH = "/v1/chat/completions"
BLOCKED_TURNS = 200
"""Turns of the loop without a word more, after which an answer waits for its client."""


@asynccontextmanager
async def unread(dispatcher: FakeDispatcher) -> AsyncIterator[tuple[FrontDoor, socket.socket]]:
    """A client that reads nothing; its request's time is up when no more can be written."""
    async with front_door(dispatcher, request_timeout_s=60) as door:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", door.port))
            client.setblocking(False)
            data = json.dumps(BODY).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
            client.sendall(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + data)
            turns = taken = 0
            while turns < BLOCKED_TURNS:
                await asyncio.sleep(0.001)
                turns = turns + 1 if 0 < dispatcher.taken == taken else 0
                taken = dispatcher.taken
            await door.services.time_limits.end_within(0)
            while door.services.limiter.running > 0:
                await asyncio.sleep(0.01)
            yield door, client


async def read_all(client: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    async with asyncio.timeout(5):
        while part := await loop.sock_recv(client, 1 << 20):
            parts.append(part)
    return b"".join(parts)


async def test_a_client_that_reads_on_learns_what_happened() -> None:
    async with unread(FakeDispatcher(answer("word " * 5000))) as (door, client):
        answered = await read_all(client)
        metrics = door.services.metrics.render().decode()
    assert f'code="504",endpoint="{PATH}",model="{MODEL}"}} 1.0' in metrics
    assert b"deadline_exceeded" in answered[-400:]
    assert answered.endswith(b"\r\n0\r\n\r\n")
    assert answered.count(b"HTTP/1.1") == 1


async def test_an_answer_that_was_complete_is_not_written_into() -> None:
    """Its last bytes wait for the client when the time is up."""
    whole = FakeDispatcher(answer("word " * 2000, tokens_per_delta=5000))
    async with unread(whole) as (door, client):
        answered = await read_all(client)
        metrics = door.services.metrics.render().decode()
    assert f'code="504",endpoint="{PATH}",model="{MODEL}"}} 1.0' in metrics
    assert answered.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_GRACE_S", 0.1)
    async with unread(FakeDispatcher(answer("word " * 5000))) as (door, client):
        await asyncio.sleep(0.3)
        answered = await read_all(client)
        metrics = door.services.metrics.render().decode()
    assert f'code="504",endpoint="{PATH}",model="{MODEL}"}} 1.0' in metrics
    assert b"deadline_exceeded" not in answered
