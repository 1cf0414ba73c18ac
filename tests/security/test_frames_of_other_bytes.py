"""What the fuzzer found in frames: text that is no UTF-8, and first elements of any length."""

from __future__ import annotations

import asyncio
import logging
import struct

import pytest

from commutator.frames import FrameProtocol, pack
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer

pytestmark = pytest.mark.security


def test_text_that_is_not_utf_8_ends_the_connection() -> None:
    lost: list[str] = []

    class Transport(asyncio.Transport):
        def abort(self) -> None:
            protocol.connection_lost(None)

    protocol = FrameProtocol(lambda _: None, lost.append)
    protocol.connection_made(Transport())
    body = b"\x91\xa2\xe1\x28"
    protocol.data_received(struct.pack(">I", len(body)) + body)
    assert len(lost) == 1
    assert lost[0].startswith("not a frame")


async def test_a_wrong_frame_writes_a_short_line(caplog: pytest.LogCaptureFixture) -> None:
    server = RegistryServer(MemoryRegistry())
    address = await server.start()
    host, _, port = address.rpartition(":")
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]
    with caplog.at_level(logging.WARNING):
        for kind in ("x" * 1_000_000, deep, {"a": "y" * 100_000}):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(pack([kind]))
            assert await reader.read() == b""
            writer.close()
    await server.stop()
    wrong = [record.getMessage() for record in caplog.records if "wrong" in record.getMessage()]
    assert len(wrong) == 3
    assert max(map(len, wrong)) < 200
