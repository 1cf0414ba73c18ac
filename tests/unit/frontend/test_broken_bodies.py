"""Bodies that cannot be decoded: one answer in OpenAI's shape, the end, and nothing in the log."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from tests.support.front_door import FakeDispatcher, front_door

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    "Content-Encoding: gzip\r\nContent-Length: 8\r\n\r\n"
)
READ = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"]


@pytest.mark.parametrize(
    ("path", "late_s", "status", "code"),
    [
        *((path, 0.0, 400, "invalid_body") for path in READ),
        *((path, 0.05, 400, "invalid_body") for path in READ),
    ],
)
async def test_a_body_that_is_not_gzip(
    path: str, late_s: float, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with front_door(FakeDispatcher()) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(HEAD.format(path=path).encode())
        await asyncio.sleep(late_s)
        writer.write(b"not gzip")
        answered = await asyncio.wait_for(reader.read(), 2)
        writer.close()
    head, _, body = answered.decode().partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert "\n" not in error["message"]
    assert "message:" not in error["message"]
    assert len(caplog.records) <= 1
    assert all(record.levelname == "INFO" for record in caplog.records)


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/health", 405)])
async def test_a_body_that_nobody_wants_is_not_unpacked(path: str, status: int) -> None:
    """So nobody notices that it is broken, and the connection can be used again."""
    async with front_door(FakeDispatcher()) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        for _ in range(2):
            writer.write(HEAD.format(path=path).encode() + b"not gzip")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            assert head.startswith(f"HTTP/1.1 {status} ".encode())
            length = head.lower().partition(b"content-length:")[2].split()[0]
            await reader.readexactly(int(length))
        writer.close()
