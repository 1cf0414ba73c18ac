"""A TCP proxy in front of a real server that does to it what networks and outages do."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from attrs import frozen

__all__ = ["Fault", "FaultProxy"]

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_BODY_BYTES = 4096
"""A piece of an answer longer than this is taken for a body, not for headers alone."""


@frozen(kw_only=True)
class Fault:
    """What happens to connections; nothing, by default."""

    delay_s: float = 0.0
    """Before each piece of an answer is passed on."""
    status: int | None = None
    """Answer every HTTP request so, without asking the server."""
    hang: bool = False
    """Accept and read, and never answer."""
    refuse: bool = False
    """Accept and close at once."""
    cut_after_bytes: int | None = None
    """Close a connection after this many bytes of answers."""
    corrupt: bool = False
    """Flip one bit in each longer piece of an answer."""


class FaultProxy:
    """Listens on ``port``, passes on to ``target_port``; its event loop has a thread of its own.

    A context manager. Each change of ``fault`` also closes the connections that are open.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._fault = Fault()
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._socket = socket.create_server((_HOST, 0))
        self.connections = 0
        """Accepted so far."""

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def set(self, fault: Fault) -> None:
        """Returns once it holds."""
        asyncio.run_coroutine_threadsafe(self._set(fault), self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._accept, sock=self._socket)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _set(self, fault: Fault) -> None:
        self._fault = fault
        ending = list(self._open)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _end(self) -> None:
        self._server.close()
        await self._set(Fault(refuse=True))
        # A connection accepted just now is not among the open ones yet.
        while pending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(pending)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(self._fault, reader, writer)
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _serve(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if fault.refuse:
            return
        if fault.hang:
            while await reader.read(_CHUNK_BYTES):
                pass
        elif fault.status is not None:
            await _answer(fault.status, reader, writer)
        else:
            upstream, to_server = await asyncio.open_connection(_HOST, self._target_port)
            asking = asyncio.create_task(_pass_on(reader, to_server, Fault()))
            answering = asyncio.create_task(_pass_on(upstream, writer, fault))
            try:
                await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
            finally:
                # First, since a change of fault may cancel this task once more while it waits.
                to_server.transport.abort()
                asking.cancel()
                answering.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
) -> None:
    passed = 0
    while piece := await reader.read(_CHUNK_BYTES):
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.corrupt and len(piece) > _BODY_BYTES:
            piece = piece[:-1] + bytes([piece[-1] ^ 1])
        if fault.cut_after_bytes is not None:
            piece = piece[: fault.cut_after_bytes - passed]
        writer.write(piece)
        await writer.drain()
        passed += len(piece)
        if passed == fault.cut_after_bytes:
            return


async def _answer(status: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    # A client that expects "100 Continue" does not send the body after any other answer.
    if length is not None and b"100-continue" not in head.lower():
        await reader.readexactly(int(length[1]))
    writer.write(b"HTTP/1.1 %d Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
    await writer.drain()
    writer.write_eof()
    await reader.read()
