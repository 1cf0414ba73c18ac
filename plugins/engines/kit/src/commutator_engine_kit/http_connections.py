"""HTTP connections to engines: little work for each request and piece of an answer.

A client for all of HTTP takes several times as long for a request as it takes to write it and to
parse its answer, which llhttp does here. This one neither follows redirects nor decompresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeAlias, cast

import httptools

from commutator.errors import EngineUnavailableError

MAX_HEAD_BYTES = 64 << 10
"""The most that a server may send without a byte of its answer's body, such as headers."""
_MOST_UNREAD_BYTES = 256 << 10
"""Of a body; then nothing more is received until its reader has taken them."""
_FRAMED_BY = (b"content-length", b"transfer-encoding")
_FINAL = 200
"""Lower statuses announce an answer, and are none."""

Connect: TypeAlias = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Makes a connection for the protocol that it is given. Raises EngineUnavailableError."""


class _Connection(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self, where: str, on_lost: Callable[[_Connection], None]) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._where = where
        self._on_lost = on_lost
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        """In the pieces."""
        self._paused = False
        self._bare_bytes = 0
        """Received since the last piece of a body."""
        self._waiter: asyncio.Future[None] | None = None
        self._asked = False
        """Whether an answer is being received."""
        self._keeps_alive = False
        self._problem: str | None = None
        """Why the connection is of no more use."""
        self.status = 0
        self.idle_since_s = 0.0
        self.lost: asyncio.Future[None] = loop.create_future()

    # What the pool and the answer call.

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return (
            not self._asked
            and self._keeps_alive
            and self._problem is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._asked, self._has_head, self._keeps_alive = True, False, False
        self._bare_bytes = 0
        self._pieces.clear()
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for ``status``. Raises EngineUnavailableError."""
        while not self._has_head:
            await self.more()

    def take(self) -> bytes | None:
        """What arrived of the body since the last time; empty at its end, None before more."""
        pieces = self._pieces
        if not pieces:
            return None if self._asked else b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread_bytes = 0
        if self._paused:
            assert self._transport is not None
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        return data

    async def more(self) -> None:
        """Wait until something arrives. Raises EngineUnavailableError when nothing will."""
        if self._problem is not None:
            raise EngineUnavailableError(f"{self._where}: connection lost ({self._problem})")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self, problem: str = "closed here") -> None:
        """End the connection at once."""
        if self._problem is None:
            self._problem = problem
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's, so isinstance cannot be used.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._problem is not None or self._parser is None:
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"it sent no valid HTTP: {error}")
        else:
            if self._bare_bytes > MAX_HEAD_BYTES:
                self.abort(f"it sent more than {MAX_HEAD_BYTES >> 10} KiB that are no answer")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        ends_body = self._asked and self._has_head and not self._is_framed()
        if exc is None and self._problem is None and ends_body:
            self._asked = False
        if self._problem is None:
            self._problem = str(exc or "the server closed it")
        self._parser = None  # which leads back to this
        self._on_lost(self)
        if not self.lost.done():
            self.lost.set_result(None)
        self._wake()

    def _is_framed(self) -> bool:
        """Whether the headers tell where the body ends; otherwise the connection's end does."""
        return any(self.header(name) is not None for name in _FRAMED_BY)

    def header(self, name: bytes) -> str | None:
        """The value of a header of the answer, by its name in lower case."""
        values = (value for given, value in self._headers if given.lower() == name)
        return next((value.decode("latin-1") for value in values), None)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if not self._asked:
            raise ValueError("an answer to nothing")
        self._headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # it is no trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status >= _FINAL:
            self._has_head = True
            self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._bare_bytes = 0
        self._pieces.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > _MOST_UNREAD_BYTES and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._asked = False
            self._bare_bytes = 0


class HttpAnswer:
    """An answer whose status has arrived; leaving its context before its end aborts the request."""

    def __init__(self, connections: HttpConnections, connection: _Connection) -> None:
        self._connections = connections
        self._connection = connection
        self.status = connection.status
        self.content_type = connection.header(b"content-type") or "application/json"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._connections.give_back(self._connection)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next piece of the body as it arrived. Raises EngineUnavailableError."""
        while (data := self._connection.take()) is None:
            await self._connection.more()
        if not data:
            raise StopAsyncIteration
        return data

    def chunks(self) -> AsyncIterator[bytes]:
        """As the answer itself: it is a ``ForwardedAnswer``."""
        return self

    async def read(self) -> bytes:
        """The rest of the body. Raises EngineUnavailableError."""
        return b"".join([piece async for piece in self])


class HttpConnections:
    """The connections to one server, without a limit. Used from one event loop.

    ``where`` names the server in errors. A connection that was idle for ``max_idle_s`` is closed.
    """

    def __init__(self, where: str, connect: Connect, max_idle_s: float) -> None:
        self._where = where
        self._connect = connect
        self._max_idle_s = max_idle_s
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        """The longest idle first."""
        self._cleanup: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes, *, again: bool = False) -> HttpAnswer:
        """Send a whole request, and wait for the status. Raises EngineUnavailableError.

        ``again``: send it once more, on a new connection, if the server closes an old one without
        an answer: it may have done so just before.
        """
        connection = await self._take()
        was_used = connection.status != 0
        try:
            connection.send(request)
            await connection.head()
        except EngineUnavailableError:
            connection.abort()
            if again and was_used:
                return await self.ask(request, again=True)
            raise
        except BaseException:
            connection.abort()
            raise
        return HttpAnswer(self, connection)

    async def _take(self) -> _Connection:
        """One that is idle, or a new one. Raises EngineUnavailableError."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now_s - connection.idle_since_s < self._max_idle_s:
                return connection
            connection.abort()
        connection = _Connection(self._where, self._forget)
        try:
            await self._connect(lambda: connection)
        except BaseException:
            connection.abort()
            raise
        if not connection.lost.done():
            self._open.add(connection)
        return connection

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next request, or abort one that is still answering."""
        connection.take()  # what nobody read would keep it from reading on
        if not connection.reusable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._cleanup is None:
            self._cleanup = loop.call_later(self._max_idle_s, self._close_idle)

    async def close(self) -> None:
        """Abort every connection. New requests connect anew."""
        if self._cleanup is not None:
            self._cleanup.cancel()
            self._cleanup = None
        self._idle.clear()
        open_ones = list(self._open)
        for connection in open_ones:
            connection.abort()
        await asyncio.gather(*(connection.lost for connection in open_ones))

    def _close_idle(self) -> None:
        self._cleanup = None
        loop = asyncio.get_running_loop()
        limit_s = loop.time() - self._max_idle_s
        while self._idle and self._idle[0].idle_since_s <= limit_s:
            self._idle.pop(0).abort()
        if self._idle:
            self._cleanup = loop.call_at(
                self._idle[0].idle_since_s + self._max_idle_s, self._close_idle
            )

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
