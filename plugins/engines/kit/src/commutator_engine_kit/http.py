"""What connectors to HTTP engines share: the server and its session, its errors, and the client."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from abc import abstractmethod
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohappyeyeballs import start_connection
from yarl import URL

from commutator.contract.engine import EngineClient
from commutator.contract.request import AdapterIdentity, GenerateRequest
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.engine.protocol import DeltaStream
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator.trust import ClientGate, Right, TlsError, is_loopback
from commutator.trust.wire import notice_loss, secured
from commutator_engine_kit.http_connections import HttpAnswer, HttpConnections
from commutator_engine_kit.model_identity import adapter_digest, changed_files

__all__ = [
    "CLOSES_IDLE_S",
    "FORWARDED_PATHS",
    "IDLE_AT_ENGINES_S",
    "INSTANCE_HEADER",
    "REFUSED_PATH",
    "RELAY_MODULE",
    "FailedAnswerError",
    "HttpAnswer",
    "HttpEngineClient",
    "HttpServer",
    "message_of",
    "reachable_host",
]

T = TypeVar("T")

INSTANCE_HEADER = "Commutator-Instance"
"""The header with which a client names the instance of a worker that it means."""
REFUSED_PATH = "/commutator/refused_connections"
"""The path at which a relay says how many it refused."""
RELAY_MODULE = "commutator_engine_kit.relay"
"""For ``HttpRelay.module``: the relay of engines' HTTP servers."""
FORWARDED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
"""Paths of OpenAI-compatible servers to which front doors forward clients' own requests."""

_ALIVE_WITHIN_S = 5.0
# These servers close connections that were idle for 5 s. Closing ours earlier avoids sending a
# request just as the server closes its end.
IDLE_AT_ENGINES_S = 3.0
"""How long a connection to an engine's server may be idle before its client closes it."""
CLOSES_IDLE_S = 75.0
"""How long one to a relay may be, before the relay closes it."""
_IDLE_AT_RELAYS_S = 30.0
"""A new one costs a TLS handshake."""
_CONNECT_S = 5.0
_NEXT_ADDRESS_S = 0.25
"""After which the next address of a host is tried, too."""
# Routing handles these two; every other answer goes to the client.
_FOR_ROUTING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared with, not bound


class FailedAnswerError(EngineError):
    """A server answered an error, or reported one in the middle of a stream.

    ``HttpServer.error_for`` makes the error to raise of its HTTP ``status`` and message.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class HttpServer:
    """One server of ``engine``, such as "vLLM", at ``url``, http://HOST:PORT.

    A live server answers ``alive_path`` at once. One ``of_cluster``, and not on this machine, is
    behind the relay of its host: with https, reached by mutual TLS with the certificates of this
    process's network.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        *,
        api_key: str | None = None,
        alive_path: str = "/health",
        answer_timeout_s: float = 10.0,
        of_cluster: bool = False,
    ) -> None:
        """Raises TlsError when this process's certificates cannot be used."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        self._relayed = of_cluster and not is_loopback(host)
        self._certificates = secured(host) if self._relayed and parts.scheme == "https" else None
        self.host = ""
        """The host of the cluster whose relay must answer; empty: any."""
        self.where = f"{engine} at {self.url}"
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._alive_path = alive_path
        self._answer_timeout_s = answer_timeout_s
        self._heads: dict[tuple[str, str], str] = {}
        idle_s = IDLE_AT_ENGINES_S if self._certificates is None else _IDLE_AT_RELAYS_S
        self._connections = HttpConnections(self.where, self._connect, idle_s)

    def expect(self, record: WorkerRecord) -> None:
        """Let only the relay of this worker answer. Called before the first request."""
        if self._relayed:
            self.host = record.host
            if record.instance:
                self._headers[INSTANCE_HEADER] = record.instance
                self._heads.clear()

    async def close(self) -> None:
        await self._connections.close()

    async def read(
        self,
        path: str,
        kind: type[T],
        *,
        method: str = "GET",
        body: object = None,
        timeout_s: float | None = None,
    ) -> T:
        """The JSON answer of ``path``. Raises as ``ask`` does, and EngineError for other JSON."""
        answer = await self.ask(path, method=method, body=body, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self.url}{path} sent an answer that cannot be parsed: {error}"
            ) from error

    async def ask(
        self, path: str, *, method: str = "GET", body: object = None, timeout_s: float | None = None
    ) -> bytes:
        """The answer of ``path``.

        Raises EngineUnavailableError when there is none or the server failed, EngineError when it
        refused the request.
        """
        sent = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s or self._answer_timeout_s):
                async with await self._send(method, path, sent) as response:
                    status, answer = response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnavailableError(f"{self.where}: no answer") from error
        if status == HTTPStatus.OK:
            return answer
        if status < HTTPStatus.BAD_REQUEST:
            raise self._redirects(status)
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = EngineUnavailableError if failed else EngineError
        raise kind(f"{self.url}{path} answered {status}: {message_of(answer)}")

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send a request; enter the context of its answer. Raises FailedAnswerError.

        EngineUnavailableError is raised for connection errors, also while the answer is read.
        """
        answer = await self._send("POST", path, msgspec.json.encode(body), headers)
        if answer.status != HTTPStatus.OK:
            async with answer:
                raise FailedAnswerError(answer.status, message_of(await answer.read()))
        return answer

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        """The answer to a client's own request; closed at the end.

        Raises EngineOverloadedError or EngineUnavailableError for a server that is full or dead.
        """
        async with await self._send("POST", path, body, headers) as answer:
            if answer.status in _FOR_ROUTING:
                raise await self.error_for(answer.status, message_of(await answer.read()))
            yield answer

    async def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Raises ValueError for a header that would be more than one."""
        head = self._heads.get((method, path))
        if head is None:
            head = self._heads[method, path] = self._head(method, path)
        for name, value in (headers or {}).items():
            if "\r" in value or "\n" in value or "\0" in value:
                raise ValueError(f"{name}: {value!r} cannot be sent")
            head += f"{name}: {value}\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        return await self._connections.ask(request, again=method == "GET")

    def _head(self, method: str, path: str) -> str:
        """What all requests for a path begin with."""
        url = URL(self.url + path)
        headers = {"Host": url.host_port_subcomponent, **self._headers}
        if url.user is not None:
            login = f"{url.user}:{url.password or ''}".encode()
            headers.setdefault("Authorization", f"Basic {b64encode(login).decode()}")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {url.raw_path_qs} HTTP/1.1\r\n{lines}"

    async def _connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Make a connection. Raises EngineUnavailableError.

        In a cluster with certificates, only the relay of the worker's host gets a byte.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                transport, host = await self._open(protocol)
            if self._certificates is not None:
                gate = ClientGate("engine relay", expects=Right.SERVE_WORKER, host=self.host)
                try:
                    gate.identify(transport)
                except TlsError as error:
                    transport.abort()
                    raise OSError(str(error)) from error
                notice_loss(transport, host)
        except TimeoutError as error:
            raise EngineUnavailableError(f"{self.where}: no answer") from error
        except OSError as error:
            raise _unreachable(self.where, error) from error

    async def _open(
        self, protocol: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, str]:
        """A new connection, and the host that it is to. Raises OSError."""
        url, context = URL(self.url), None
        host = url.raw_host or ""
        if self._certificates is not None:
            context = self._certificates.client  # renewed ones serve new connections
        elif url.scheme == "https":
            context = _system_trust()
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
        sock = await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        name = None if context is None else host.rstrip(".")
        transport, _ = await loop.create_connection(
            protocol, sock=sock, ssl=context, server_hostname=name
        )
        return transport, host

    async def error_for(self, status: int, message: str) -> Exception:
        """The error for a failed request: the server is full, or dead, or the request is wrong."""
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return EngineOverloadedError(message)
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return EngineError(f"{self.where} refuses us ({status}): {message}; see `api_key`")
        if status < HTTPStatus.BAD_REQUEST:
            return self._redirects(status)
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return RequestError(message)
        if not await self.is_alive():
            return EngineUnavailableError(f"{self.where} is dead: {message}")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return EngineOverloadedError(message)
        return EngineError(f"{self.where} answers {status}: {message}")

    def _redirects(self, status: int) -> EngineError:
        return EngineError(
            f"{self.where} answers {status} where 200 is expected; if it redirects, configure "
            "the address that it redirects to"
        )

    async def refused_connections(self, *, timeout_s: float = 5.0) -> Mapping[str, int]:
        """Those that the server's relay refused. Raises EngineError."""
        if not self._relayed:
            return {}
        return await self.read(REFUSED_PATH, dict[str, int], timeout_s=timeout_s)

    async def is_alive(self) -> bool:
        """Whether the server answers ``alive_path`` with status 200."""
        try:
            await self.ask(self._alive_path, timeout_s=_ALIVE_WITHIN_S)
        except EngineError:
            return False
        return True


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    """The list of models and adapters of a server."""

    data: list[_Model]


class HttpEngineClient(EngineClient):
    """A client of ``server``; an engine's own says what it asks and how it generates."""

    adapters_path: ClassVar[str | None] = None
    """Where the server is told to load an adapter; None: it cannot be told."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._info: EngineInfo | None = None
        self._adapters: dict[str, asyncio.Task[None]] = {}
        """What loads an adapter or has loaded it, by its digest."""
        self._running: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def discover(self) -> EngineInfo:
        """Ask the server what it is. Raises as ``start`` does."""

    @abstractmethod
    async def answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        """Fill ``stream`` to its end; ``model`` is the server's. Cancelling it aborts the request.

        Raises the errors of ``TokenStream``.
        """

    def expect(self, record: WorkerRecord) -> None:
        self.server.expect(record)

    async def refused_connections(self, *, timeout_s: float = 5.0) -> Mapping[str, int]:
        return await self.server.refused_connections(timeout_s=timeout_s)

    async def start(self) -> EngineInfo:
        if self._info is None:  # the dispatcher calls this before each request
            self._adapters = {}
            self._info = await self.discover()
        return self._info

    def generate(self, request: GenerateRequest) -> DeltaStream:
        info = self._info
        unmet = self._not_connected if info is None else info.unmet(request)
        if info is None or unmet is not None:
            stream = DeltaStream(lambda: None)
            stream.fail(unmet or self._not_connected)
            return stream

        def abort() -> None:
            task.cancel()

        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            # A stream that has not ended was aborted: its caller closed it and gets no error, or
            # this client closes.
            reason = f"{self.server.where}: the connection was closed"
            stream.fail(EngineUnavailableError(reason))

        stream = DeltaStream(abort)
        task = asyncio.get_running_loop().create_task(self._run(request, info.model, stream))
        self._running.add(task)
        task.add_done_callback(ended)
        return stream

    async def _run(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        try:
            with self.forgets_a_lost_server():
                if request.adapter is not None and request.adapter.source is not None:
                    await self._need_adapter(request.adapter)
                await self.answer(request, model, stream)
        except Exception as error:  # noqa: BLE001 - the reader of the stream gets it
            stream.fail(error)

    async def _need_adapter(self, adapter: AdapterIdentity) -> None:
        """Have the server load it, unless it has; several requests wait for one load.

        Raises RequestError when it cannot, EngineError when the files have changed.
        """
        if (loading := self._adapters.get(adapter.digest)) is None:
            loading = asyncio.create_task(self._load_adapter(adapter))
            self._adapters[adapter.digest] = loading
        try:
            await asyncio.shield(loading)
        except Exception:
            if self._adapters.get(adapter.digest) is loading:  # the next request tries again
                del self._adapters[adapter.digest]
            raise

    async def _load_adapter(self, adapter: AdapterIdentity) -> None:
        if self.adapters_path is None:
            raise RequestError(f"{self.server.where} cannot load adapter {adapter}", "model")
        source = str(adapter.source)
        try:
            asked = {"lora_name": adapter.digest, "lora_path": source}
            async with await self.server.post(self.adapters_path, asked) as answer:
                await answer.read()
        except FailedAnswerError as failed:
            if not await self._has_adapter(adapter):  # another front door may have been first
                why = f"{self.server.where} cannot load adapter {adapter}: {failed}"
                raise RequestError(why, "model") from failed
        if await asyncio.to_thread(adapter_digest, Path(source)) != adapter.digest:
            raise EngineError(changed_files(adapter))  # it might be of other files than the digest

    async def _has_adapter(self, adapter: AdapterIdentity) -> bool:
        models = await self.server.read("/v1/models", _Models)
        return any(one.id == adapter.digest for one in models.data)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        if self._info is None:
            raise self._not_connected
        with self.forgets_a_lost_server():
            async with self.server.forward(path, body, headers) as answer:
                yield answer

    async def check_health(self) -> None:
        with self.forgets_a_lost_server():
            await self.server.ask("/health")

    async def close(self) -> None:
        self._info = None
        for task in self._running:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.server.close()

    @property
    def _not_connected(self) -> EngineUnavailableError:
        return EngineUnavailableError(f"{self.server.where}: not connected")

    @contextmanager
    def forgets_a_lost_server(self) -> Iterator[None]:
        """After EngineUnavailableError, ``start`` asks again: another server may have started."""
        try:
            yield
        except EngineUnavailableError:
            self._info = None
            raise


def message_of(body: bytes) -> str:
    """The message of an error answer, in any of the engines' formats."""
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace")
    error = answer.get("error") or answer.get("detail") or answer
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _unreachable(where: str, cause: OSError) -> EngineUnavailableError:
    if isinstance(cause, ssl.SSLError):
        reason = getattr(cause, "verify_message", "") or cause.reason or str(cause)
        return EngineUnavailableError(f"{where} cannot be reached: TLS failed: {reason}")
    known = cause.errno in errno.errorcode
    what = os.strerror(cause.errno) if known and cause.errno else str(cause.strerror or cause)
    return EngineUnavailableError(f"{where} cannot be reached: {what}")


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def reachable_host(host: str, url: str) -> str:
    """The host at which a server that reports listening on ``host`` is reachable.

    For a wildcard address, this is the host of ``url``.
    """
    if host not in _WILDCARDS:
        return host
    name = urlsplit(url).hostname or "127.0.0.1"
    return f"[{name}]" if ":" in name else name
