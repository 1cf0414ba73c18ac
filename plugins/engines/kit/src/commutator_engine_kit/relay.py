"""The relay: a port for other hosts before the HTTP server of an engine on this host.

Engines' own servers neither encrypt nor know who asks, so they stay on the loopback interface. The
relay, a process of its own beside each of them, takes requests by mutual TLS and passes them on: to
the processes whose certificates allow what they ask, and who know the run's secret. Answers pass
in the pieces in which they arrive; who goes away aborts the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from hmac import compare_digest
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import hdrs, web
from yarl import URL

from commutator.contract.engine import RelayStart
from commutator.engine.protocol import INSTANCE
from commutator.launcher.child import (
    calm_garbage_collector,
    log_to_stderr,
    raise_descriptor_limit,
    run_with_fast_loop,
    told_to_stop,
)
from commutator.trust import (
    Identity,
    Listener,
    Right,
    ServerGate,
    TlsError,
    listen,
    network_of_this_process,
    refused_connections,
)
from commutator_engine_kit.http import (
    CLOSES_IDLE_S,
    IDLE_AT_ENGINES_S,
    INSTANCE_HEADER,
    REFUSED_PATH,
)
from commutator_engine_kit.launching import api_key_at

log = logging.getLogger("commutator_engine_kit.relay")  # not "__main__"

SERVICE = "engine relay"
"""What refused connections and requests are counted for."""

_MAX_CONNECTIONS = 4096
_MOST_HEADERS = 64
_MOST_HEADER_BYTES = 8190
"""Of the request's line, and of each header."""
_CONNECT_S = 5.0
_READS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})
_OF_ONE_CONNECTION = frozenset({
    "authorization", "connection", "expect", "host", "keep-alive", "proxy-authenticate",
    "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "x-api-key",
    INSTANCE_HEADER.lower(),
})  # fmt: skip
"""Headers that are not passed on."""


def base_of(address: str) -> str:
    """An address without what follows its host and port."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


class _Connection(web.RequestHandler):
    """One connection, of a process whose certificate allows it something here."""

    def __init__(self, relay: RelayServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=CLOSES_IDLE_S,
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
            max_headers=_MOST_HEADERS,
            auto_decompress=False,
        )
        self._relay = relay
        self.identity: Identity | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's, so isinstance cannot be used.
        accepted = cast(asyncio.Transport, transport)
        try:
            self.identity = self._relay.admit(accepted)
        except TlsError:  # it was counted and logged
            accepted.abort()
        else:
            super().connection_made(transport)


class RelayServer:
    """Serves one engine's HTTP server to the cluster. Used from one event loop.

    ``instance`` is that of the worker; requests that mean another one are refused.
    """

    def __init__(self, start: RelayStart, *, instance: str | None = None) -> None:
        self._rules = start.rules
        self._instance = instance
        self._target = base_of(start.target)
        self._key = api_key_at(base_of(start.url))
        self._engine_key = start.rules.api_key or api_key_at(self._target)
        self._gate = ServerGate(SERVICE)
        self._server = web.Server(self._handle, handler_cancellation=True)
        self._session: aiohttp.ClientSession | None = None
        self._listener: Listener | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port. Raises OSError, TlsError."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_AT_ENGINES_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._listener = await listen(lambda: _Connection(self, self._server), SERVICE, host, port)
        return self._listener.port

    async def stop(self) -> None:
        """Close every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._server.shutdown(0)
        if self._session is not None:
            await self._session.close()

    def admit(self, transport: asyncio.Transport) -> Identity | None:
        """Who connects, by its certificate; None without TLS. Raises TlsError."""
        identity = self._gate.identify(transport)
        problem = None
        if len(self._server.connections) >= _MAX_CONNECTIONS:
            problem = f"{_MAX_CONNECTIONS} connections are open"
        elif identity is not None and not self._may(identity, Right.GENERATE, Right.OPERATE):
            problem = f"{identity} must not {Right.GENERATE}"
        if problem is not None:
            self._gate.refuse(transport, problem)
            raise TlsError(problem)
        return identity

    def _may(self, identity: Identity, *rights: Right) -> bool:
        """Whether it has one of the rights; this host may always look after its own worker."""
        own = network_of_this_process()
        of_this_host = own is not None and identity.name == own.host
        return (of_this_host and identity.may(Right.SERVE_WORKER)) or any(map(identity.may, rights))

    def _needed_rights(self, request: web.BaseRequest) -> tuple[Right, ...]:
        """The rights of which one is needed for a request."""
        path = request.rel_url.raw_path
        if request.method in _READS and path in (REFUSED_PATH, *self._rules.read_paths):
            return Right.GENERATE, Right.OPERATE
        if request.method == hdrs.METH_POST and path in self._rules.request_paths:
            return (Right.GENERATE,)
        return (Right.OPERATE,)

    def _problem(self, request: web.BaseRequest) -> tuple[HTTPStatus, str] | None:
        """Why a request is refused."""
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        if self._key is not None and not compare_digest(
            given.encode(), f"Bearer {self._key}".encode()
        ):
            return HTTPStatus.UNAUTHORIZED, "it does not know this run's secret"
        needed = self._needed_rights(request)
        assert isinstance(request.protocol, _Connection)
        identity = request.protocol.identity
        if identity is not None and not self._may(identity, *needed):
            return HTTPStatus.FORBIDDEN, f"{identity} must not {needed[0]}"
        meant = request.headers.get(INSTANCE_HEADER)
        if meant is not None and self._instance is not None and meant != self._instance:
            reason = f"it means instance {meant[:32]!r} of a worker; this is {self._instance!r}"
            return HTTPStatus.SERVICE_UNAVAILABLE, reason
        return None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (found := self._problem(request)) is not None:
            status, reason = found
            if request.transport is not None:
                self._gate.refuse(request.transport, reason)
            return _failed(status, reason)
        if request.rel_url.raw_path == REFUSED_PATH:
            return web.json_response(dict(refused_connections()))
        try:
            return await self._pass_on(request)
        except (aiohttp.ClientError, OSError) as error:
            if request.transport is None:
                raise  # the client went away
            log.debug("%s %s: %s", request.method, request.path, error)
            return _failed(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine cannot be reached: {error}")

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises ClientError and OSError while nothing of the answer has been sent."""
        assert self._session is not None
        headers = _passed_on(request.headers)
        if self._engine_key is not None:
            headers[hdrs.AUTHORIZATION] = f"Bearer {self._engine_key}"
        asked = self._session.request(
            request.method,
            URL(self._target + request.rel_url.raw_path_qs, encoded=True),
            headers=headers,
            data=request.content if request.can_read_body else None,
            allow_redirects=False,
        )
        async with asked as answer:
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
            )
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            except (aiohttp.ClientError, OSError):
                # The client must not take for a whole answer what is only its beginning.
                if request.transport is not None:
                    request.transport.abort()
        return response


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION
    }


def _failed(status: HTTPStatus, reason: str) -> web.Response:
    body: dict[str, Any] = {"error": {"message": f"{SERVICE}: {reason}"}}
    response = web.json_response(body, status=status)
    response.force_close()
    return response


async def _serve(start: RelayStart) -> None:
    stopped = told_to_stop()
    server = RelayServer(start, instance=os.environ.get(INSTANCE))
    await server.start(start.listen, start.port)
    log.info("%s is served to other hosts at %s", start.target, start.url)
    await stopped.wait()
    await server.stop()


def main() -> None:
    """Relay until SIGTERM or SIGINT."""
    log_to_stderr()
    raw = os.environ.get(RelayStart.VARIABLE)
    if raw is None:
        sys.exit(f"{RelayStart.VARIABLE} is not set: `commutator serve` starts this process")
    raise_descriptor_limit()
    calm_garbage_collector()
    start = msgspec.json.decode(raw, type=RelayStart)
    try:
        run_with_fast_loop(_serve(start))
    except (OSError, TlsError) as error:
        sys.exit(f"ERROR the relay to {start.target} cannot listen at {start.url}: {error}")


if __name__ == "__main__":
    main()
