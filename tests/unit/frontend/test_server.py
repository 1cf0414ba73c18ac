"""The server's own part: broken HTTP, ports, and an end that loses no request."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from tests.support.front_door import FakeDispatcher, answer, front_door, make_services

from commutator.errors import ConfigError
from commutator.frontend.process import wait_for_workers
from commutator.launcher.child import run_with_fast_loop
from commutator_http.config import HttpConfig
from commutator_http.server import open_server


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
    ids=["no method", "version", "length", "smuggling", "long header"],
)
async def test_broken_http_is_answered_in_the_same_shape(data: bytes) -> None:
    async with front_door(FakeDispatcher()) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(data)
        answered = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    head, _, body = answered.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]


async def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await open_server(HttpConfig(port=port), make_services(FakeDispatcher()))


@pytest.mark.parametrize("streaming", [True, False])
async def test_what_runs_is_finished_before_the_end(streaming: bool) -> None:
    dispatcher = FakeDispatcher(answer("word " * 30 + "last"), delay_s=0.01)
    async with front_door(dispatcher) as door:
        url = f"{door.url}/v1/completions"
        body = {"model": "smol", "prompt": "x", "stream": streaming, "max_tokens": 40}

        async def ask() -> str:
            async with door.session.post(url, json=body) as response:
                return await response.text()

        running = asyncio.create_task(ask())
        while not dispatcher.open:
            await asyncio.sleep(0.001)
        door.stop.set()
        await asyncio.sleep(0.05)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", door.port)
        assert "last" in await running
    assert dispatcher.open == 0


@pytest.mark.parametrize("streaming", [True, False])
async def test_what_takes_too_long_is_ended_with_an_error(streaming: bool) -> None:
    dispatcher = FakeDispatcher(answer("word " * 3000), delay_s=0.01)
    loop = asyncio.get_running_loop()
    async with front_door(dispatcher, drain_timeout_s=0.5) as door:
        url = f"{door.url}/v1/completions"
        body = {"model": "smol", "prompt": "x", "stream": streaming, "max_tokens": 3000}

        async def ask() -> tuple[int, str]:
            async with door.session.post(url, json=body) as response:
                return response.status, await response.text()

        running = asyncio.create_task(ask())
        while not dispatcher.open:
            await asyncio.sleep(0.001)
        started_s = loop.time()
        door.stop.set()
        status, text = await running
        taken_s = loop.time() - started_s
    assert 0.4 < taken_s < 5, "the whole answer takes 30"
    assert loop.time() - started_s < taken_s + 3, "nor does the end wait as long again"
    assert status == (200 if streaming else 504)
    assert "shutting down" in text
    assert "[DONE]" not in text
    assert dispatcher.open == 0


async def test_the_log_says_how_many_requests_are_finished_and_until_when(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commutator.frontend.limits._REPORT_EVERY_S", 0.1)
    caplog.set_level("INFO", "commutator.frontend.process")
    dispatcher = FakeDispatcher(answer("word " * 3000), delay_s=0.01)
    async with front_door(dispatcher, drain_timeout_s=3.0) as door:
        asked = [asyncio.create_task(door.chat(max_tokens=2000)) for _ in range(2)]
        while dispatcher.open < 2:
            await asyncio.sleep(0.001)
        door.stop.set()
        await asyncio.gather(*asked)
    first, *more = [line for line in caplog.messages if "finishing" in line]
    assert first == "finishing 2 requests (at most 3 s)"
    assert "finishing 2 requests (at most 1 s)" in more, "and says so again while they run"


async def test_a_door_without_requests_ends_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "commutator.frontend.process")
    async with front_door(FakeDispatcher()):
        pass
    assert not [line for line in caplog.messages if "finishing" in line]


async def test_a_request_that_comes_late_has_what_is_left_of_the_time() -> None:
    dispatcher = FakeDispatcher(answer("word " * 3000), delay_s=0.01)
    async with front_door(dispatcher, drain_timeout_s=0.6) as door:
        kept = asyncio.create_task(door.chat(max_tokens=2000))
        while not dispatcher.open:
            await asyncio.sleep(0.001)
        await door.get("/live")  # a connection that stays
        door.stop.set()
        await asyncio.sleep(0.2)
        status, body = await door.chat(max_tokens=2000)
        assert status == 504
        assert "shutting down" in body["error"]["message"]
        assert (await kept)[0] == 504


async def test_connections_opened_while_it_drains_lose_no_request() -> None:
    async with front_door(FakeDispatcher(), settle_s=0.5) as door:
        late = 0

        async def ask_until_refused() -> None:
            nonlocal late
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
                except OSError:
                    return
                try:
                    await asyncio.sleep(0.2)  # the port may close meanwhile
                    writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    answered = await reader.read()
                finally:
                    writer.close()
                assert answered.startswith(b"HTTP/1.1 200 ")
                late += door.stop.is_set()

        clients = [asyncio.create_task(ask_until_refused()) for _ in range(8)]
        await door.get("/live")
        door.stop.set()
        await asyncio.gather(*clients)
    assert late > len(clients)


async def test_a_draining_door_is_not_ready() -> None:
    async with front_door(FakeDispatcher()) as door:
        door.services.draining = True
        status, body = await door.get("/ready")
        assert (status, body["error"]["message"]) == (
            503,
            "this front door cannot serve every model now; GET /health says why",
        )
        assert (await door.get("/health"))[1]["status"] == "draining"
        assert (await door.chat())[0] == 200


async def test_a_front_door_says_for_what_it_waits_before_its_port_opens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    informed = asyncio.Event()
    waiting = asyncio.create_task(wait_for_workers(informed, 0.0))
    async with asyncio.timeout(30):
        while "the port opens once it has" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    informed.set()
    await waiting
    caplog.clear()
    await wait_for_workers(informed)
    assert caplog.text == ""


def test_the_loop_is_uvloop_where_there_is_one() -> None:
    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run_with_fast_loop(name()) == "uvloop"
