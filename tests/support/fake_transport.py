"""A transport without a network: what is written is kept, and tests say what is received."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["FakeTransport"]


class FakeTransport(asyncio.Transport):
    """The transport of a new protocol, which is told of the connection at once."""

    def __init__(self, factory: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unsent_bytes = 0
        """Of what was written, as the transport says it."""
        self.closed = False
        self.paused = False
        """Whether the protocol wants no more for now."""
        self._protocol = factory()
        self._protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def receive(self, data: bytes) -> None:
        """The other end sends, unless the connection is closed."""
        if not self.closed and data:
            self._protocol.data_received(data)

    def lose(self, error: Exception | None = None) -> None:
        """The other end closes."""
        if not self.closed:
            self.closed = True
            self._protocol.connection_lost(error)
