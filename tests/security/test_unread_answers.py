"""Clients that do not read what they ask for keep nobody else out, and cost bounded memory."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door

from commutator.contract.settings import Secret

pytestmark = pytest.mark.security

PLACES = 64
KEY = "the-right-key"
ASKED = {
    "a file of the page": b"GET /ui/style.css HTTP/1.1\r\nHost: x\r\n\r\n" * 600,
    "without a key": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 4_000,
    "probes": b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
}


@asynccontextmanager
async def keyed_door(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[FrontDoor]:
    monkeypatch.setenv("COMMUTATOR_TEST_KEY", KEY)
    keys = (Secret(env="COMMUTATOR_TEST_KEY"),)
    async with front_door(
        FakeDispatcher(), api_keys=keys, max_connections=PLACES, **options
    ) as door:
        yield door


@contextmanager
def unread(port: int, asked: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send as much as is taken, and never read."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            one.connect(("127.0.0.1", port))
            one.setblocking(False)
            one.send(asked)
            opened.append(one)
        yield opened


async def ask(door: FrontDoor, session: ClientSession) -> int:
    """The status of a request with a key."""
    async with session.post(
        f"{door.url}/v1/completions",
        json={"model": MODEL, "prompt": "Hi", "max_tokens": 2},
        headers={"Authorization": f"Bearer {KEY}"},
    ) as answered:
        return answered.status


async def until_all_wait(door: FrontDoor) -> None:
    """Until nothing more is answered."""
    last = -1.0
    while (now := _answered(door)) != last:
        last = now
        await asyncio.sleep(0.3)


def _answered(door: FrontDoor) -> float:
    lines = door.services.metrics.render().decode().splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith("commutator_requests_total")]
    return sum(map(float, counts))


def _dropped(door: FrontDoor, reason: str) -> float:
    page = door.services.metrics.render().decode()
    line = f'commutator_connections_dropped_total{{reason="{reason}"}} '
    return float(page.partition(line)[2].split()[0])


@pytest.mark.parametrize("what", ASKED)
async def test_they_make_room_for_others(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed_door(monkeypatch) as door:
        with unread(door.port, ASKED[what], PLACES):
            await until_all_wait(door)
            async with AsyncExitStack() as stack:
                for _ in range(8):  # each keeps its connection
                    session = await stack.enter_async_context(ClientSession())
                    assert await ask(door, session) == 200
            assert _dropped(door, "full") == 8


@pytest.mark.parametrize("what", ASKED)
async def test_they_have_a_deadline(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed_door(monkeypatch, write_timeout_s=0.5) as door:
        with unread(door.port, ASKED[what], 8):
            async with asyncio.timeout(20):
                while _dropped(door, "unread_answer") < 8:
                    await asyncio.sleep(0.1)


async def test_who_reads_slowly_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed_door(monkeypatch, write_timeout_s=0.5) as door:
        with unread(door.port, ASKED["a file of the page"], 1) as (slow,):
            loop, read = asyncio.get_running_loop(), 0
            for _ in range(20):
                await asyncio.sleep(0.1)
                read += len(await loop.sock_recv(slow, 2_000))
        assert read > 5_000
        assert not _dropped(door, "unread_answer")


async def test_a_stream_that_is_generated_has_the_deadline_of_its_request() -> None:
    dispatcher = FakeDispatcher(answer("An answer. " * 3_000))
    async with front_door(dispatcher, write_timeout_s=0.2, request_timeout_s=2.0) as door:
        body = f'{{"model": "{MODEL}", "prompt": "Hi", "stream": true, "n": 8}}'.encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        with unread(door.port, head + body, 1):
            await asyncio.sleep(1.0)
            assert not _dropped(door, "unread_answer")
            async with asyncio.timeout(10):
                while dispatcher.open:
                    await asyncio.sleep(0.05)


async def test_a_connection_that_is_to_be_closed_is_closed_unread() -> None:
    """Closing waits for what is not sent; not for ever."""
    async with front_door(FakeDispatcher(), write_timeout_s=0.3) as door:
        last = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        asked = b"GET /ui/style.css HTTP/1.1\r\nHost: x\r\n\r\n" * 12 + last
        with unread(door.port, asked, 4):
            async with asyncio.timeout(10):
                while door_connections(door.port):
                    await asyncio.sleep(0.1)


def door_connections(port: int) -> int:
    """The established connections of the port on this machine, of the server's side."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = f":{port:04X}"
    return sum(row[1].endswith(mine) and row[3] == "01" for row in rows)


async def test_the_kernel_holds_a_bounded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests and answers together at most 512 KiB a connection, where it was 1.6 MB."""
    async with keyed_door(monkeypatch) as door:
        before = kernel_bytes()
        with unread(door.port, ASKED["without a key"], PLACES):
            await until_all_wait(door)
            each = (kernel_bytes() - before) / PLACES
    assert each < 1 << 20  # with the client's own side, which is on this machine, too


def kernel_bytes() -> int:
    """What all TCP sockets of the machine hold."""
    lines = Path("/proc/net/sockstat").read_text().splitlines()
    line = next(line for line in lines if line.startswith("TCP:"))
    return int(line.split()[-1]) * 4096


async def test_they_are_named_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("commutator_http.connections._WINDOW_S", 1.0)
    async with keyed_door(monkeypatch) as door:
        with unread(door.port, ASKED["without a key"], 8):
            await until_all_wait(door)
            await asyncio.sleep(1.2)
    lines = [record.getMessage() for record in caplog.records if "401" in record.getMessage()]
    assert 0 < len(lines) <= 40
    said = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "minute" in text]
    assert "requests without a valid key" in said[0]
    assert "all by 127.0.0.1" in said[0]
