"""Runs the front door: sockets, TLS, and an end that loses no request."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

from aiohttp import web

from commutator.config.model import FrontendConfig, TlsConfig
from commutator.errors import ConfigError
from commutator.frontend.errors import HttpError, error_response
from commutator.frontend.listener import listening_sockets, turn_away
from commutator.frontend.services import SERVICES

__all__ = ["Runner", "run_with_fast_loop", "serve_app", "tls_context"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_BACKLOG = 1024
_INTERNAL = 500
_LAST_WORDS_S = 1.0
"""For what is being written when the last request has ended; aiohttp takes up to twice as long."""


async def serve_app(
    app: web.Application,
    config: FrontendConfig,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[int], None],
    drain_timeout_s: float,
    reuse_port: bool = False,
    socket_path: str | None = None,
    settle_s: float = 0.25,
) -> None:
    """Serve until ``stop`` is set; then take nothing new and let what runs finish.

    ``on_listening`` is given the port, which port 0 lets the system choose. ``socket_path`` is a
    second way in, a Unix socket that no other process shares, opened last. ``settle_s``: what was
    on its way when ``stop`` was set may take this long to arrive. Requests that still run after
    ``drain_timeout_s`` are ended as by their own time limit. Raises ConfigError when the address
    cannot be listened on or the certificate cannot be read.
    """
    context = None if config.tls is None else tls_context(config.tls)
    runner = Runner(app)
    await runner.setup()
    try:
        sockets = _listen(config, reuse_port)
        for listening in sockets:
            await web.SockSite(runner, listening, ssl_context=context, backlog=_BACKLOG).start()
        if socket_path is not None:
            await web.UnixSite(runner, socket_path).start()
        on_listening(int(sockets[0].getsockname()[1]))
        await stop.wait()
        app[SERVICES].draining = True
        turn_away(sockets)
        await asyncio.sleep(settle_s)
        await app[SERVICES].time_limits.end_within(drain_timeout_s)
    finally:
        await runner.cleanup()


def _listen(config: FrontendConfig, reuse_port: bool) -> list[socket.socket]:
    host, port = config.host, config.port
    try:
        return listening_sockets(host, port, backlog=_BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError([problem], "frontend") from error


def run_with_fast_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop where that is installed."""
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop  # noqa: PLC0415 - an option

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class Runner(web.AppRunner):
    """Cancels a handler when its client goes away, and answers broken HTTP in OpenAI's shape."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S
        )

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
        """A body that turns out broken after its answer is the client's affair."""
        theirs = isinstance(more.get("exc_info"), web.RequestPayloadError)
        log.log(logging.DEBUG if theirs else logging.ERROR, *args, **more)


def tls_context(config: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError when the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            [f"certificate {config.cert_file} with key {config.key_file}: {error}"], "frontend.tls"
        ) from error
    return context
