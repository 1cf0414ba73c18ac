"""Frames that are sent in one turn of the event loop leave in one write."""

from __future__ import annotations

import asyncio
from typing import Any

from commutator.frames import FrameProtocol, pack


class Transport(asyncio.Transport):
    """Records what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 7

    def close(self) -> None:
        self.closed = True


def connection() -> tuple[FrameProtocol, Transport]:
    frames, transport = FrameProtocol(lambda _: None, lambda _: None), Transport()
    frames.connection_made(transport)
    return frames, transport


FIRST: list[Any] = ["abort", 1]
SECOND: list[Any] = ["abort", 2]


async def test_one_write_a_turn() -> None:
    frames, transport = connection()
    frames.send(FIRST)
    frames.send(SECOND)
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [pack(FIRST) + pack(SECOND)]
    frames.send(FIRST)
    await asyncio.sleep(0)
    assert transport.writes[1:] == [pack(FIRST)]


async def test_waiting_frames_count_as_unsent() -> None:
    frames, _ = connection()
    frames.send(FIRST)
    assert frames.unsent_bytes == 7 + len(pack(FIRST))
    await asyncio.sleep(0)
    assert frames.unsent_bytes == 7


async def test_closing_sends_what_waits() -> None:
    frames, transport = connection()
    frames.send(FIRST)
    frames.close()
    frames.send(SECOND)
    await asyncio.sleep(0)
    assert transport.writes == [pack(FIRST)]
    assert transport.closed
