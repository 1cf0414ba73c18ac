"""Sockets and HTTP connections of the OpenAI front door."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web

from commutator import OpenFrontend
from commutator.errors import ConfigError
from commutator.frontend import FrontendServices
from commutator_openai.app import build_app
from commutator_openai.config import OpenAiConfig, tls_context
from commutator_openai.protocol.errors import HttpError, error_response

__all__ = [
    "Runner",
    "open_server",
]

log = logging.getLogger(__name__)

_BACKLOG = 1024
_ACCEPT_S = 0.1
_SO_ATTACH_FILTER = 26
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
    config: OpenAiConfig, services: FrontendServices, local_socket: str | None = None
) -> OpenServer:
    """Listen on the configured address, and on the Unix socket ``local_socket`` if given.

    Raises ConfigError when the address cannot be listened on or the certificate cannot be read.
    """
    context = None if config.tls is None else tls_context(config.tls)
    runner = Runner(build_app(config, services, local_socket))
    await runner.setup()
    try:
        sockets = _listen(config)
        sites = [
            web.SockSite(runner, listening, ssl_context=context, backlog=_BACKLOG)
            for listening in sockets
        ]
        for site in sites:
            await site.start()
        if local_socket is not None:
            await web.UnixSite(runner, local_socket).start()
    except BaseException:
        await runner.cleanup()
        raise
    return OpenServer(runner, sites, int(sockets[0].getsockname()[1]))


class OpenServer(OpenFrontend):
    """The listening server."""

    def __init__(self, runner: Runner, sites: list[web.SockSite], port: int) -> None:
        self.port = port
        self._runner = runner
        self._sites = sites

    async def stop_accepting(self) -> None:
        _ignore_new_connections(site._sock for site in self._sites)  # noqa: SLF001
        await asyncio.sleep(_ACCEPT_S)  # those in the queue are accepted meanwhile
        for site in self._sites:
            await site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()


class Runner(web.AppRunner):
    """Cancels a handler when its client goes away, and answers broken HTTP in OpenAI's shape."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=_FLUSH_S)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            **self._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    __slots__ = ()

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
        response = error_response(HttpError(status, text, "bad_http"))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **more: Any) -> None:
        """A body that turns out broken after it was answered is the client's mistake."""
        theirs = isinstance(more.get("exc_info"), web.RequestPayloadError)
        log.log(logging.DEBUG if theirs else logging.ERROR, *args, **more)


def _listen(config: OpenAiConfig) -> list[socket.socket]:
    """One socket for each address of the host; port 0 chooses one port, the same for all."""
    host, port = config.host, config.port
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            made = socket.create_server(
                (address[0], port), family=family, backlog=_BACKLOG, reuse_port=True
            )
            sockets.append(made)
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
