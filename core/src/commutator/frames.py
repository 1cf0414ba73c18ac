"""Frames over TCP: a 4-byte big-endian length, then one MessagePack array that is not empty."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

__all__ = [
    "FrameProtocol",
    "pack",
]

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def pack(frame: list[Any] | tuple[Any, ...]) -> bytes:
    """One frame, ready to write."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream of one connection into frames.

    ``on_frame`` gets each decoded array; ``on_lost`` is called once when the connection ends, with
    the reason. A frame that is too long or not MessagePack ends the connection.
    """

    def __init__(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._problem: str | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's, so isinstance cannot be used.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, frame: list[Any] | tuple[Any, ...]) -> None:
        """Write one frame, together with what else is sent in this turn of the event loop.

        Dropped silently when the connection has ended.
        """
        if self.transport is not None and not self.transport.is_closing():
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent.append(pack(frame))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))

    @property
    def unsent_bytes(self) -> int:
        """Bytes passed to ``send`` that the system has not accepted yet."""
        taken = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return taken + sum(map(len, self._unsent))

    def close(self) -> None:
        """Close the connection after writing what was sent."""
        self._flush()
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                self._fail(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                return
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                frame = _decoder.decode(memoryview(buffer)[start + _LENGTH.size : end])
            except (msgspec.DecodeError, RecursionError) as error:
                self._fail(f"not a frame: {error}")
                return
            start = end
            if not isinstance(frame, list) or not frame:
                self._fail("not a frame: expected a non-empty array")
                return
            self._on_frame(frame)
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._problem or (str(exc) if exc else "connection closed"))

    def _fail(self, problem: str) -> None:
        self._problem = problem
        assert self.transport is not None
        self.transport.abort()
