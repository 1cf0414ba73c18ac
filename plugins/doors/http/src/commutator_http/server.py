"""Sockets and HTTP connections of the door."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from aiohttp import StreamReader, hdrs, web

from commutator.contract.answer import Failure
from commutator.contract.door import OpenDoor
from commutator.contract.protocol import MountedProtocol
from commutator.errors import ConfigError
from commutator.frontend import FrontendServices
from commutator_http.app import build_app, build_local_app
from commutator_http.call import DOOR, ClientConnection, is_generating
from commutator_http.config import HttpConfig, tls_context
from commutator_http.connections import Connection, ConnectionTable, Listener, most_connections
from commutator_http.health import PROBE_PATHS
from commutator_http.middleware import failure_response, find_answer

log = logging.getLogger(__name__)

_BACKLOG = 4096
_LINGERING_S = 2.0
"""How long the rest of a body that was not needed is read, so that the client sees the answer."""
_REFUSED_S = 0.5
_OPERATORS = 64
"""Connections of operators and their tools."""
_MAX_HEADERS = 100
_MAX_HEADER_LINE = 8190
_MAX_HEADER_BYTES = 64 << 10
_ACCEPT_S = 0.1
_UNSENT_BYTES = 64 << 10
"""Of an answer; with more, the handler waits until the client has read."""
_KERNEL_BYTES = 128 << 10
"""Of one connection's requests, and of its answers, in the kernel, which takes twice as much. It
would take 6 MiB and 4 MiB of one that is not read. 2 MB/s remain on a line of 100 ms."""
_SIOCOUTQ = 0x5411
_SO_ATTACH_FILTER = 26
_INT = struct.Struct("i")
_INSTRUCTION = struct.Struct("=HBBI")
# Classic BPF over the TCP header: drop what has SYN but not ACK in its flags, pass all else.
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # only SYN: go on; otherwise skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)
_INTERNAL = 500
_FLUSH_S = 1.0
"""Time to send the rest of the last responses; aiohttp takes up to twice as long."""


async def open_server(
    config: HttpConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol] = (),
    local_socket: str | None = None,
) -> OpenServer:
    """Listen on the configured address.

    On the Unix socket ``local_socket``, if given, everything is served without a key. Raises
    ConfigError when an address cannot be listened on or the certificate cannot be read.
    """
    context = None if config.tls is None else tls_context(config.tls)
    most = most_connections(config.max_connections)
    if most < config.max_connections:
        log.warning("at most %d connections, as the limit of open files leaves no more", most)
    app = build_app(config, services, protocols, local_socket)
    strangers = app[DOOR].strangers

    def dropped(reason: str, address: str) -> None:
        services.metrics.connection_dropped(reason)
        if strangers.add(f"connections closed ({reason})", address):
            log.info("a connection of %s was closed: %s", address or "an operator", reason)

    table = ConnectionTable(most, config.max_connections_per_address, on_drop=dropped)
    failed = partial(failure_response, protocol=protocols[0] if protocols else None)
    runner = Runner(app, table, config, failed)
    runners = [runner]
    try:
        await runner.setup()
        listener = Listener(_listen(config.host, config.port), table, runner.protocol, context)
        port = int(listener.sockets[0].getsockname()[1])
        listener.start()
        if local_socket is not None:
            runners.append(await open_local(config, services, protocols, local_socket))
    except BaseException:
        for each in runners:
            await each.cleanup()
        raise
    return OpenServer(runners, listener, port, for_clients=bool(protocols))


async def open_local(
    config: HttpConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol],
    local_socket: str,
) -> Runner:
    """Serve everything, without a key, on a Unix socket; also for a door of another transport."""
    app = build_local_app(config, services, protocols, local_socket)
    failed = partial(failure_response, protocol=protocols[0] if protocols else None)
    local = Runner(app, ConnectionTable(_OPERATORS, _OPERATORS), config, failed)
    try:
        await local.setup()
        await web.UnixSite(local, local_socket).start()
    except BaseException:
        await local.cleanup()
        raise
    return local


class OpenServer(OpenDoor):
    """The listening server."""

    def __init__(
        self, runners: Sequence[Runner], listener: Listener, port: int, *, for_clients: bool
    ) -> None:
        """Operators keep their connections until the end."""
        self.port = port
        self._runners = runners
        self._listener = listener
        self._for_clients = for_clients

    async def stop_accepting(self) -> None:
        if not self._for_clients:
            return
        _ignore_new_connections(self._listener.sockets)
        await asyncio.sleep(_ACCEPT_S)  # those in the queue are accepted meanwhile
        self._listener.stop()

    async def close(self) -> None:
        await self._listener.close()
        for runner in self._runners:
            await runner.cleanup()


class Runner(web.AppRunner):
    """Cancels a handler when its client goes away, and answers broken HTTP as ``failed`` says."""

    def __init__(
        self,
        app: web.Application,
        table: ConnectionTable,
        config: HttpConfig,
        failed: Failed,
    ) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_FLUSH_S,
            keepalive_timeout=config.keep_alive_timeout_s,
            max_field_size=_MAX_HEADER_LINE,
            max_line_size=_MAX_HEADER_LINE,
            max_headers=_MAX_HEADERS,
            lingering_time=_LINGERING_S,
            auto_decompress=False,  # ``commutator_http.call`` does, what it wants
        )
        self.table = table
        self.config = config
        self.failed = failed

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        handler = partial(find_answer, self.app[DOOR], server.request_handler)
        return _Server(self, handler, request_factory=server.request_factory, **self._kwargs)

    def protocol(self, connection: Connection) -> web.RequestHandler:
        """The protocol of a connection that counts in the table."""
        assert isinstance(self.server, _Server)
        return self.server.protocol(connection)


class _Server(web.Server):
    def __init__(self, runner: Runner, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self.runner = runner

    def __call__(self) -> web.RequestHandler:
        """For the local socket, whose connections do not count."""
        return self.protocol(None)

    def protocol(self, connection: Connection | None) -> web.RequestHandler:
        return _Protocol(self, connection, loop=self._loop, **self._kwargs)


class _Protocol(ClientConnection, web.RequestHandler):
    """One connection: its deadlines, and its place in the table."""

    __slots__ = (
        "_accepted",
        "_body",
        "_config",
        "_connection",
        "_failed",
        "_header_bytes",
        "_header_timer",
        "_table",
        "_write_timer",
    )  # fmt: skip

    def __init__(self, server: _Server, connection: Connection | None, **options: Any) -> None:
        super().__init__(server, **options)
        runner = server.runner
        self._table, self._config, self._failed = runner.table, runner.config, runner.failed
        self._connection = connection
        self._body: StreamReader | None = None
        """Of the last request whose headers came."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Of a request whose headers are not complete."""
        self._accepted: asyncio.Transport | None = None
        """Also once it is being closed, when ``transport`` may be None."""
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # uvloop's transports do not subclass asyncio's, so isinstance cannot be used.
        self._accepted = cast("asyncio.Transport", transport)
        self._accepted.set_write_buffer_limits(high=_UNSENT_BYTES)
        if self._connection is not None:
            self._connection.close = self._accepted.abort
        self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_came()
        self._was_read()
        self._accepted = None
        if self._connection is not None:
            self._table.closed(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._close:
            return
        known = self._request_count
        of_body = self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._request_count > known:
            self._headers_came()
            self._body = self._messages[-1][1]
            return
        if of_body or self._messages or self._current_request is not None:
            return  # requests that are read or answered have deadlines of their own
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(_LONG_HEADERS)
        elif self._header_timer is None and data:
            self._expect_headers()

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Any
    ) -> tuple[web.StreamResponse, bool]:
        connection = self._connection
        if connection is None:
            return await super()._handle_request(request, start_time, request_handler)
        if connection.probes_only and request.path not in PROBE_PATHS:
            request_handler = self._too_many_connections
        self._table.works(connection)
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            self.waits_for_client()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            # Closing waits until everything is sent.
            if self._write_timer is None and self._unsent_bytes():
                self._expect_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.waits_for_client()
        if self._write_timer is None:
            self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()
        if self._current_request is not None:
            self.works_for_client()

    def _expect_reading(self) -> None:
        self._write_timer = self._loop.call_later(
            self._config.write_timeout_s, self._read_some, self._unsent_bytes()
        )

    def _was_read(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _read_some(self, unsent_bytes: int) -> None:
        """Whether the client has read since there were ``unsent_bytes``; else it is dropped.

        An answer that is still being generated has the deadline of its request.
        """
        self._write_timer = None
        now_unsent = self._unsent_bytes()
        if not now_unsent:
            return
        if now_unsent < unsent_bytes or is_generating(self._current_request):
            self._expect_reading()
            return
        self._table.on_drop("unread_answer", self._address)
        if self._accepted is not None:
            self._accepted.abort()

    def _unsent_bytes(self) -> int:
        """What the client's machine has not taken yet, here and in the kernel."""
        transport = self._accepted
        if transport is None:
            return 0
        count = transport.get_write_buffer_size()
        sent_by = transport.get_extra_info("socket")
        if sent_by is not None and sys.platform == "linux":
            with suppress(OSError, ValueError):  # it may have been closed
                (in_kernel,) = _INT.unpack(fcntl.ioctl(sent_by.fileno(), _SIOCOUTQ, bytes(4)))
                count += in_kernel
        return count

    @property
    def _address(self) -> str:
        return "" if self._connection is None else self._connection.address

    def knows_client(self) -> None:
        if self._connection is not None:
            self._connection.is_known = True

    def waits_for_client(self) -> None:
        if self._connection is not None and not self._connection.over:
            self._table.waits(self._connection)

    def works_for_client(self) -> None:
        if self._connection is not None:
            self._table.works(self._connection)

    def _expect_headers(self) -> None:
        self._header_timer = self._loop.call_later(self._config.header_timeout_s, self._too_slow)

    def _headers_came(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self._refuse(_SLOW_HEADERS)

    def _refuse(self, failure: Failure) -> None:
        """Answer a client that has sent no complete request, and close."""
        self._headers_came()
        self._table.on_drop(str(failure.code), self._address)
        if self.transport is not None:
            self.transport.write(_raw(self._failed(failure)))
        # Closing with something unread would reset the connection, and the client never see why.
        self._close = True
        self._header_timer = self._loop.call_later(_REFUSED_S, self.force_close)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = _INTERNAL,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Only for what never reaches the application: HTTP that cannot be parsed."""
        log.debug("broken HTTP from %s", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; no error can be sent any more")
        detail = (message or "").splitlines()
        text = f"not readable as HTTP: {detail[0][:200]}" if detail else "not readable as HTTP"
        if status >= _INTERNAL:
            log.error("a request failed outside of the application", exc_info=exc)
            text = "internal error"
        return self._closing(Failure(status, text, "bad_http"))

    def _closing(self, failure: Failure) -> web.Response:
        response = self._failed(failure)
        response.force_close()
        return response

    async def _too_many_connections(self, _: web.BaseRequest) -> web.StreamResponse:
        text = "too many connections are open; close some, or try again soon"
        return self._closing(
            Failure(503, text, "too_many_connections", headers={"Retry-After": "1"})
        )

    def log_exception(self, *args: Any, **more: Any) -> None:
        """A body that turns out broken after it was answered is the client's mistake."""
        theirs = isinstance(more.get("exc_info"), web.RequestPayloadError)
        log.log(logging.DEBUG if theirs else logging.ERROR, *args, **more)


Failed = Callable[[Failure], web.Response]
"""Makes an answer that is no success."""


def _raw(answer: web.Response) -> bytes:
    """All of ``answer``, for where there is no request to answer through aiohttp."""
    body = answer.body
    assert isinstance(body, bytes)
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.headers[hdrs.CONTENT_TYPE]}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_SLOW_HEADERS = Failure(408, "the request's headers did not arrive in time", "headers_too_slow")
_LONG_HEADERS = Failure(
    431, f"the request's headers are longer than {_MAX_HEADER_BYTES} bytes", "headers_too_long"
)


def _listen(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host; port 0 chooses one port, the same for all."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            made = socket.create_server(
                (address[0], port), family=family, backlog=_BACKLOG, reuse_port=True
            )
            sockets.append(made)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # accepted ones have the same
                made.setsockopt(socket.SOL_SOCKET, option, _KERNEL_BYTES)
            port = made.getsockname()[1]
    except OSError as error:
        for made in sockets:
            made.close()
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError([problem], "frontend") from error
    return sockets


def _ignore_new_connections(sockets: Iterable[socket.socket]) -> None:
    """Ignore new connection attempts; those already begun can still be accepted.

    Closing a listening socket resets the connections that wait in its queue, although their
    clients may have sent requests already: a drain under load lost some. Ignored attempts are
    repeated by the client's system, and find the port closed, or another process listening. Does
    nothing but on Linux.
    """
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in _DROP_SYN))
    program = struct.pack("@HL", len(_DROP_SYN), ctypes.addressof(code))
    for listening in sockets:
        with suppress(OSError):  # a hardened kernel may refuse filters
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
