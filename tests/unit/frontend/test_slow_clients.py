"""Clients that send half a request, or too many of them, keep nobody else out."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from tests.support.front_door import MODEL, FakeDispatcher, answer, front_door

from commutator.contract.request import UNKNOWN_CALLER
from commutator.launcher.child import raise_descriptor_limit
from commutator_http.connections import ConnectionTable, most_connections

HALF_A_HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow"
HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 99\r\n\r\n{"
)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(port: int, sent: bytes) -> tuple[bytes, dict[str, dict[str, str]]]:
    """The status line and the JSON of what is answered."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        body = await reader.readexactly(
            int(head.lower().partition(b"content-length:")[2].split()[0])
        )
    return head.split(b"\r\n")[0], json.loads(body)


@pytest.mark.security
async def test_half_a_header_has_a_deadline() -> None:
    async with front_door(FakeDispatcher(), header_timeout_s=1.0) as door:
        for sent in (HALF_A_HEADER, b"G", b""):
            status, body = await answer_to(door.port, sent)
            assert status == b"HTTP/1.1 408 Request Timeout"
            assert body["error"]["code"] == "headers_too_slow"
        page = door.services.metrics.render()
    assert b'commutator_connections_dropped_total{reason="headers_too_slow"} 3.0' in page


@pytest.mark.security
async def test_half_a_header_on_a_connection_that_is_kept_has_a_deadline() -> None:
    async with (
        front_door(FakeDispatcher(), header_timeout_s=0.6) as door,
        connected(door.port) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(len(b'{"status":"ok"}'))
            await asyncio.sleep(0.7)  # longer than the deadline: nothing of a request has come
        writer.write(HALF_A_HEADER)
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 408")


@pytest.mark.security
async def test_a_kept_connection_is_closed_after_a_while() -> None:
    async with (
        front_door(FakeDispatcher(), keep_alive_timeout_s=0.1) as door,
        connected(door.port) as (reader, writer),
    ):
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")


@pytest.mark.security
async def test_half_a_body_has_a_deadline() -> None:
    async with front_door(FakeDispatcher(), body_timeout_s=0.1) as door:
        status, body = await answer_to(door.port, HALF_A_BODY)
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert body["error"]["code"] == "body_too_slow"


@pytest.mark.security
async def test_headers_without_end_are_refused() -> None:
    lines = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 4000) for number in range(40))
    async with front_door(FakeDispatcher()) as door:
        status, body = await answer_to(door.port, b"GET / HTTP/1.1\r\n" + lines)
        assert status.startswith(b"HTTP/1.1 431")
        assert body["error"]["code"] == "headers_too_long"
        status, _ = await answer_to(door.port, b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n")
        assert b" 400 " in status


@pytest.mark.security
async def test_a_full_queue_is_told_before_the_body_is_read() -> None:
    async with (
        front_door(FakeDispatcher(), max_concurrent_requests=1, max_queued_requests=0) as door,
        door.services.limiter.of(UNKNOWN_CALLER),
    ):
        status, body = await answer_to(
            door.port, HALF_A_BODY.replace(b"Host", b"Connection: close\r\nHost")
        )
    assert (status, body["error"]["code"]) == (b"HTTP/1.1 429 Too Many Requests", "queue_full")


@pytest.mark.security
async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    sent = HALF_A_BODY.replace(b" 99", b" 99999999").replace(b"Host", b"Connection: close\r\nHost")
    async with front_door(FakeDispatcher()) as door:
        status, body = await answer_to(door.port, sent)
    assert status.startswith(b"HTTP/1.1 413")
    assert body["error"]["code"] == "body_too_large"


@pytest.mark.security
@pytest.mark.parametrize("sent", [HALF_A_HEADER, HALF_A_BODY, b""])
async def test_who_has_waited_longest_makes_room_for_a_new_connection(sent: bytes) -> None:
    async with front_door(FakeDispatcher(), max_connections=20) as door:
        slow = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(60)]
        for _, writer in slow:
            with suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
        status, _ = await door.complete()
        assert status == 200
        for reader, _ in slow[:20]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, writer in slow:
            writer.close()


@pytest.mark.security
async def test_probes_are_answered_while_every_connection_works() -> None:
    dispatcher = FakeDispatcher(answer("word " * 3000), delay_s=0.01)
    async with front_door(dispatcher, max_connections=2) as door:
        running = [asyncio.create_task(door.complete(max_tokens=2000)) for _ in range(2)]
        while dispatcher.open < 2:
            await asyncio.sleep(0.001)
        assert (await door.get("/live"))[0] == 200
        status, body = await door.complete()
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert (await door.get("/ready"))[0] == 200
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.security
async def test_one_address_has_a_limit_if_one_is_set() -> None:
    async with front_door(FakeDispatcher(), max_connections_per_address=2) as door:
        async with connected(door.port), connected(door.port):
            await asyncio.sleep(0.05)
            status, _ = await door.complete()
            assert status == 503
        while (await door.complete())[0] != 200:  # until both are known to be closed
            await asyncio.sleep(0.01)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(
    ("wanted", "descriptors", "most"),
    [(4096, 1 << 20, 4096), (4096, 1024, 944), (4096, 128, 48), (4096, 64, 8), (4, 64, 4)],
)
def test_descriptors_are_left_for_other_things(wanted: int, descriptors: int, most: int) -> None:
    assert most_connections(wanted, descriptors) == most


def test_the_table_drops_the_oldest_that_waits_and_never_one_that_works() -> None:
    reasons: list[str] = []
    table = ConnectionTable(3, for_probes=1, on_drop=lambda reason, _: reasons.append(reason))
    dropped: list[str] = []
    opened = []
    for name in "abc":
        connection = table.admit("")
        assert connection is not None
        connection.close = partial(dropped.append, name)
        opened.append(connection)
    table.works(opened[0])
    assert not getattr(table.admit(""), "probes_only", True)
    assert dropped == ["b"]
    table.waits(opened[0])
    for _ in range(2):
        newest = table.admit("")
        assert newest is not None
        table.works(newest)
    assert dropped == ["b", "c"]
    assert table.open == 3
    assert reasons == ["full"] * 3
    assert table.make_room("no_descriptors")
    assert reasons[3:] == ["no_descriptors"]


def test_connections_that_never_had_a_key_make_room_first() -> None:
    dropped: list[str] = []
    table = ConnectionTable(3, on_drop=lambda _, address: dropped.append(address))
    for address in ("keyed", "stranger", "late"):
        connection = table.admit(address)
        assert connection is not None
        if address == "keyed":
            table.works(connection)
            connection.is_known = True
            table.waits(connection)
    for _ in range(3):
        newest = table.admit("new")
        assert newest is not None
        table.works(newest)
    assert dropped == ["stranger", "late", "keyed"]


LONG = answer("An answer. " * 800)
"""One token at a time: 2,400 of them."""


async def begin_chat(writer: asyncio.StreamWriter, **more: object) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more})
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body.encode())
    )
    await writer.drain()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


async def settled(number: Callable[[], int]) -> int:
    """What ``number`` returns once it does not change any more."""
    last, same = -1, 0
    while same < 20:
        await asyncio.sleep(0.01)
        now = number()
        last, same = now, same + 1 if now == last else 0
    return last


@pytest.mark.security
async def test_logprobs_that_nobody_reads_are_bounded() -> None:
    dispatcher = FakeDispatcher(LONG)
    wanted = {"logprobs": True, "top_logprobs": 20}
    async with (
        front_door(dispatcher, max_logprobs=100_000, max_concurrent_requests=4) as door,
        connected(door.port) as (reader, writer),
    ):
        budget = door.services.logprobs
        await begin_chat(writer, n=16, stream=True, **wanted)
        await until(lambda: len(dispatcher.requests) == 16)
        await until(lambda: dispatcher.open == 0)  # no engine goes on for nobody
        assert budget.held < budget.most
        status, _ = await door.chat(max_tokens=20, **wanted)
        assert status == 200, "others are answered meanwhile"
        answered = await asyncio.wait_for(reader.read(), 30)
        assert b"too_many_logprobs" in answered
        assert b"[DONE]" not in answered
        await until(lambda: budget.held == 0)


@pytest.mark.security
async def test_logprobs_of_whole_answers_are_bounded() -> None:
    dispatcher = FakeDispatcher(LONG)
    wanted = {"logprobs": True, "top_logprobs": 20}
    async with front_door(dispatcher, max_logprobs=100_000, max_concurrent_requests=4) as door:
        status, refused = await door.chat(n=16, **wanted)
        assert (status, refused["error"]["code"]) == (429, "too_many_logprobs")
        assert "frontend.max_logprobs" in refused["error"]["message"]
        assert (door.services.logprobs.held, dispatcher.open) == (0, 0)
        status, answered = await door.chat(n=2, max_tokens=600, **wanted)
        assert status == 200
        assert [len(one["logprobs"]["content"]) for one in answered["choices"]] == [600, 600]
        assert door.services.logprobs.held == 0


@pytest.mark.security
async def test_answers_that_nobody_reads_are_not_made() -> None:
    """Their tokens wait in the streams, which merge them."""
    dispatcher = FakeDispatcher(answer("An answer. " * 3_000))
    async with (
        front_door(dispatcher) as door,
        connected(door.port) as (reader, writer),
    ):
        await begin_chat(writer, n=8, stream=True)
        await until(lambda: dispatcher.taken > 0)
        taken = await settled(lambda: dispatcher.taken)
        every = sum(1 for _ in dispatcher.script(dispatcher.requests[0])) * 8
        assert 0 < taken < every / 2
        answered = await asyncio.wait_for(reader.read(), 60)
        assert answered.count(b'"finish_reason":"length"') == 8
        assert dispatcher.taken == every
