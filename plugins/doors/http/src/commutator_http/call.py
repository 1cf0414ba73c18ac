"""One request over HTTP: what the client sent, read within its limits, and the answer to it.

What the headers tell is checked before the first byte of the body is read: its type, its length,
and whether there is room for one more request.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from aiohttp import StreamReader, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from attrs import frozen
from multidict import CIMultiDictProxy, istr

from commutator.contract.answer import AnswerWriter, Failure
from commutator.contract.protocol import MountedProtocol
from commutator.errors import RequestError
from commutator.frontend import Call, FrontendServices, Gate, rate_limits
from commutator_http.byte_budget import ByteBudget
from commutator_http.config import HttpConfig
from commutator_http.connections import Strangers
from commutator_http.cors import Cors
from commutator_http.health import OPERATIONS_PATHS, PROBE_PATHS
from commutator_http.hosts import Hosts
from commutator_http.inflate import CODINGS, InflateError, Inflater
from commutator_http.silence import Silences

WEBSOCKET = "WEBSOCKET"
"""The method of routes, and of calls, that are messages of a WebSocket."""
OTHER = "other"
"""Stands, in metrics, for every path that is none of ours."""
_OK = 200
_PART_BYTES = 256 << 10
# Parsing this much takes a few milliseconds.
_INLINE_BYTES = 64 << 10
# Bodies of the largest size that are read and parsed at the same time; others wait.
_BODIES = 8
_MAX_WAITING = 256


class ClientConnection:
    """A connection that is told when it waits for its client; see ``commutator_http.server``."""

    __slots__ = ()

    def knows_client(self) -> None:
        """A request on it had a key that is known here."""

    def waits_for_client(self) -> None:
        """A part of the request is still to come, or the answer is not read.

        The connection may be closed for another one.
        """

    def works_for_client(self) -> None:
        """The request is complete, and what there is of an answer is read."""


@frozen
class MountedRoute:
    """A path of a door, and the protocol that has it."""

    path: str
    answer: Callable[[HttpCall], Awaitable[None]]
    protocol: MountedProtocol
    """In whose shape errors are said."""


class DoorParts:
    """What the requests of one application share."""

    def __init__(
        self,
        config: HttpConfig,
        services: FrontendServices,
        gate: Gate,
        protocols: Sequence[MountedProtocol] = (),
        *,
        identifies: bool = False,
        is_local: bool = False,
        cors: Cors | None = None,
    ) -> None:
        """``identifies``: whether clients must say who they are, but on the paths of ``files``.

        ``is_local``: they come over a Unix socket, which no page of a browser reaches.
        """
        self.services = services
        self.gate = gate
        self.max_body_bytes = config.max_body_bytes
        self.body_timeout_s = config.body_timeout_s
        self.max_websockets = config.max_websockets
        self.websocket_idle_s = config.websocket_idle_s
        self.websocket_ping_s = config.websocket_ping_s
        self.websockets: set[web.WebSocketResponse] = set()
        """Those that are open."""
        self.bodies = ByteBudget(_BODIES * config.max_body_bytes, _MAX_WAITING)
        """Those that are being read or parsed, small ones apart."""
        self.forward_headers = tuple(services.config.forward_headers)
        self.default = protocols[0] if protocols else None
        """In whose shape errors are said where no route is found."""
        self.identifies = identifies
        self.cors = cors
        self.protocols: dict[Handler, MountedProtocol] = {}
        """By the handlers of their routes."""
        self.routes: dict[tuple[str, str], MountedRoute] = {}
        """By method and path: those that are answered without the application's own way to them."""
        self.files = {*PROBE_PATHS, "/", "/ui"}
        """Paths that need no key: of probes, and of files without any data of the deployment. Also
        where there is no page: a browser sends no key, and hears so."""
        self.strangers = Strangers()
        self.silences = Silences(config.ping_s)
        names = Hosts(config.allowed_hosts)
        self.is_local = is_local
        self.hosts = None if identifies or is_local or names.all else names
        """Checks whom requests were meant for, where no key says who sends them."""


DOOR: web.AppKey[DoorParts] = web.AppKey("door", DoorParts)


class _Response(web.StreamResponse):
    """An answer in pieces."""

    # The first piece follows its headers at once: one packet, as with aiohttp's own web.Response.
    _send_headers_immediately = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Begin it in one step: aiohttp's own are for lengths, cookies, compression and hooks."""
        if self.prepared or self.status != _OK or request.version < HttpVersion11:
            return await super().prepare(request)
        self._req = request
        writer = self._payload_writer = request.writer
        headers = self.headers
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        if not self._keep_alive:
            headers[hdrs.CONNECTION] = "close"
        headers[hdrs.TRANSFER_ENCODING] = "chunked"
        headers[hdrs.DATE] = rfc822_formatted_time()
        headers[hdrs.SERVER] = SERVER_SOFTWARE
        writer.enable_chunking()
        await writer.write_headers("HTTP/1.1 200 OK", headers)
        return writer


class HttpCall(Call):
    """A request over HTTP."""

    response: web.StreamResponse | None = None
    """The answer, once there is one."""
    ended = False
    """Its last bytes are written, though perhaps not sent."""
    sent = False
    """Its last bytes are the network's: a client that leaves from then on may have read it."""
    headers: CIMultiDictProxy[str]
    spoke_s = 0.0
    """When the last piece of a stream was sent, by ``time.perf_counter``."""
    _failed: Callable[[Failure], bytes] | None = None
    _streamed: AnswerWriter | None = None

    def __init__(
        self,
        request: web.Request,
        parts: DoorParts,
        endpoint: str,
        path: str,
        protocol: MountedProtocol | None,
    ) -> None:
        headers = request.headers
        request_id = request_id_of(headers)
        super().__init__(parts.services, request_id, endpoint, request.method, path, headers)
        self.request = request
        self.parts_of_door = parts
        self.protocol = protocol
        self._path_parts: Mapping[str, str] = {}

    @classmethod
    def of(cls, request: web.Request) -> HttpCall:
        """The call of a request that the application found a handler for, or none."""
        parts, found = request.app[DOOR], request.match_info
        resource = found.route.resource
        endpoint = OTHER if resource is None else resource.canonical
        protocol = parts.protocols.get(found.handler, parts.default)
        call = cls(request, parts, endpoint, request.path, protocol)
        call._path_parts = found
        return call

    @property
    def peer(self) -> str | None:
        return self.request.remote or None

    @property
    def forwarded(self) -> Sequence[str]:
        return self.parts_of_door.forward_headers

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query

    @property
    def parts(self) -> Mapping[str, str]:
        return self._path_parts

    def check_origin(self) -> None:
        """Raise Failure if the page of a site that may not call sends the request.

        A browser asks before it sends JSON, and hears no. It sends text, forms and nothing without
        asking.
        """
        origin, request = self.headers.get(hdrs.ORIGIN), self.request
        if origin is None or _is_json(request.content_type):
            return
        if self.headers.get("Sec-Fetch-Site") == "same-origin":
            return  # also behind a proxy, where the host has another name
        cors = self.parts_of_door.cors
        if origin.partition("://")[2] == request.host or (cors and cors.allows(origin)):
            return
        raise Failure(
            web.HTTPForbidden.status_code,
            f"pages of {origin[:100]} may not send this; send JSON, or add the origin to the "
            "door's cors_origins",
            "origin_not_allowed",
        )

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        request, parts = self.request, self.parts_of_door
        # Browsers send text/plain, and bodies without a type, to any site without asking. Requiring
        # JSON keeps such pages out.
        given = request.content_type if hdrs.CONTENT_TYPE in self.headers else "none"
        if not (given in types or ((not types or _JSON in types) and _is_json(given))):
            raise Failure(
                web.HTTPUnsupportedMediaType.status_code,
                f"expected Content-Type: {' or '.join(types or [_JSON])}, got {given[:100]}",
                "unsupported_media_type",
            )
        coding, length = _coding(self.headers), request.content_length
        if length is not None and length > parts.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(parts.max_body_bytes, length)
        if length is None or coding is not None:
            length = parts.max_body_bytes
        return room_for(self, parts.bodies, length)

    async def read(self) -> bytes:
        if not self.body:  # the protocol may look at it again
            complete = self.request.content.is_eof()
            self.body = await (self._read_to_end() if complete else self._read_in_time())
        return self.body

    async def _read_in_time(self) -> bytes:
        connection, timeout_s = self.request.protocol, self.parts_of_door.body_timeout_s
        if isinstance(connection, ClientConnection):
            connection.waits_for_client()
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await self._read_to_end()
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the body did not arrive within {timeout_s:g} s"
            raise Failure(web.HTTPRequestTimeout.status_code, text, "body_too_slow") from None
        finally:
            if isinstance(connection, ClientConnection):
                connection.works_for_client()

    async def _read_to_end(self) -> bytes:
        """The whole body, unpacked. Raises RequestError, Failure, HTTPRequestEntityTooLarge."""
        content, max_bytes = self.request.content, self.parts_of_door.max_body_bytes
        try:
            coding = _coding(self.headers)
            if coding is not None:
                return await _read_compressed(content, coding, max_bytes)
            if not content.is_eof():
                return await self.request.read()
            return _within(max_bytes, content.read_nowait())
        except (HttpProcessingError, web.RequestPayloadError, InflateError) as error:
            text = f"the body cannot be read: {_reason(error)}"
            raise RequestError(text, code="invalid_body") from error

    async def reply(
        self, parts: list[bytes], content_type: str = "application/json; charset=utf-8"
    ) -> None:
        size = sum(map(len, parts))
        headers = {hdrs.CONTENT_TYPE: content_type}
        if size <= _PART_BYTES:
            self.response = web.Response(body=b"".join(parts), headers=headers)
            return
        # Large answers are sent in parts, so that others are served meanwhile; a part is given up
        # once it is sent, since to free much takes long.
        response = self.response = web.StreamResponse(headers=headers)
        response.content_length = size
        await self._start(response)
        parts.reverse()
        while parts:
            await self._write_in_parts(response, parts.pop())
            await asyncio.sleep(0)  # a client that reads fast does not keep the others waiting
        await response.write_eof()

    def will_stream(self, writer: AnswerWriter) -> None:
        if writer.ping:
            self._streamed, self.spoke_s = writer, self.arrived_s
            self.parts_of_door.silences.watch(self)

    async def ping(self) -> None:
        """Send the writer's ping, unless the client has still to read what was sent."""
        writer, transport = self._streamed, self.request.transport
        if writer is None or self.ended or transport is None or transport.get_write_buffer_size():
            return
        if self.response is None:
            await self.begin(writer.stream_type, failed=writer.stream_failed)
        await self.write(writer.ping)

    def settle(self) -> None:
        if self._streamed is not None:
            self.parts_of_door.silences.forget(self)
        super().settle()

    async def begin(
        self,
        content_type: str,
        status: int = 200,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        if self.response is not None:
            return  # with a ping
        self._failed = failed
        response = self.response = _Response(status=status)
        response.headers[hdrs.CONTENT_TYPE] = content_type
        if failed is not None:
            response.headers.update(_STREAM_HEADERS)

    @property
    def answered(self) -> web.StreamResponse:
        """The answer, after the protocol's handler has run."""
        assert self.response is not None, f"{self.path} was not answered"
        return self.response

    async def write(self, data: bytes) -> None:
        response = self.response
        assert response is not None, "begin comes first"
        if not response.prepared:
            await self._start(response)
        self.spoke_s = time.perf_counter()
        if len(data) <= _PART_BYTES:
            await response.write(data)
        else:
            await self._write_in_parts(response, data)

    async def end(self, last: bytes = b"") -> None:
        response = self.response
        assert response is not None, "begin comes first"
        if not response.prepared:
            await self._start(response)
        self.ended = True
        await response.write_eof(last)
        self.sent = True

    async def _start(self, response: web.StreamResponse) -> None:
        self.add_headers(response)
        await response.prepare(self.request)

    @property
    def begun(self) -> bool:
        return self.response is not None and self.response.prepared

    def add_headers(self, response: web.StreamResponse) -> None:
        """Add the request id and the collected headers."""
        headers, parts = response.headers, self.parts_of_door
        if self.path not in OPERATIONS_PATHS:  # nobody looks for a probe in the log
            headers[_REQUEST_ID] = self.request_id
        headers[hdrs.SERVER] = "commutator"  # else aiohttp tells its version and Python's
        if self.answer_headers:
            headers.update(self.answer_headers)
        if self.ticket is not None:
            headers.update(rate_limits(self.ticket.standing))
        if parts.cors is not None:
            parts.cors.add_headers(self.request, response)
        if parts.services.draining:
            # The client's next request must reach another front door.
            close_after(response)

    async def _write_in_parts(self, response: web.StreamResponse, data: bytes) -> None:
        """Write ``data`` no faster than the client reads it."""
        view = memoryview(data)
        for start in range(0, len(data), _PART_BYTES):
            if start:
                await asyncio.sleep(0)
            await response.write(bytes(view[start : start + _PART_BYTES]))

    async def end_failed(self, failure: Failure) -> None:
        """End what has begun with what its protocol says, or else by closing the connection.

        Raises ConnectionError when the client has disconnected.
        """
        assert self.response is not None
        if self._failed is not None and not self.ended:
            await _write_last(self.request, self.response, self._failed(failure))
        else:
            _abort_later(self.request)
            _close(self.request)


_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # makes nginx forward events at once
}

CALL: web.RequestKey[HttpCall] = web.RequestKey("call", HttpCall)


def close_after(response: web.StreamResponse) -> None:
    """Close the connection after ``response``, whose headers may exist already."""
    response.force_close()
    response.headers[hdrs.CONNECTION] = "close"


_SMALL: AbstractAsyncContextManager[None] = nullcontext()


class MessageCall(Call):
    """A call that is one message, mostly of a connection with many, and what answers it."""

    _failed: Callable[[Failure], bytes] | None = None
    _begun = False

    async def read(self) -> bytes:
        return self.body

    async def reply(
        self, parts: list[bytes], content_type: str = "application/json; charset=utf-8"
    ) -> None:
        del content_type  # messages have none
        await self.write(b"".join(parts))

    async def begin(
        self,
        content_type: str,
        status: int = _OK,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        del content_type, status
        self._failed = failed

    async def end(self, last: bytes = b"") -> None:
        await self.write(last)

    @property
    def begun(self) -> bool:
        return self._begun

    def failed_message(self, failure: Failure) -> bytes:
        """What went wrong, as the protocol says it."""
        assert self.protocol is not None
        return (self._failed or self.protocol.failed_message)(failure)


def room_for(call: Call, budget: ByteBudget, length: int) -> AbstractAsyncContextManager[None]:
    """Inside, ``length`` bytes of a request may be parsed. Raises OverloadedError."""
    limiter = call.services.limiter
    if limiter.is_full:
        limiter.check(call.caller())
    return _SMALL if length <= _INLINE_BYTES else budget.hold(length)


def _within(max_bytes: int, body: bytes) -> bytes:
    if len(body) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, len(body))
    return body


def _coding(headers: CIMultiDictProxy[str]) -> str | None:
    """How the body is compressed; None if it is not. Raises HttpError for what is unknown here.

    The connection's parser unpacks nothing: a few kilobytes may become as much as anybody wants,
    and a body that is refused for another reason is never looked at.
    """
    if hdrs.CONTENT_ENCODING not in headers:
        return None
    given = ",".join(headers.getall(hdrs.CONTENT_ENCODING)).strip().lower()
    if given in {"", "identity"}:
        return None
    if given not in CODINGS:
        raise Failure(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Encoding: {', '.join(CODINGS)} or none, got {given[:100]}",
            "unsupported_content_encoding",
            headers={"Accept-Encoding": ", ".join(CODINGS)},
        )
    return given


async def _read_compressed(content: StreamReader, coding: str, max_bytes: int) -> bytes:
    """The body, unpacked in small steps with other requests between them."""
    inflater = Inflater(coding, max_bytes)
    try:
        while data := await content.readany():
            for _ in inflater.pieces(data):
                await asyncio.sleep(0)
        return inflater.end()
    except (InflateError, web.HTTPRequestEntityTooLarge):
        content.set_exception(web.RequestPayloadError("refused"))  # the rest is not read either
        raise


_JSON = "application/json"


def _is_json(content_type: str) -> bool:
    return content_type == _JSON or content_type.endswith("+json")


def _reason(error: Exception) -> str:
    """The reason in one line; aiohttp's own text adds a status code and a second line."""
    cause = error.__cause__ if isinstance(error, web.RequestPayloadError) else error
    return cause.message if isinstance(cause, HttpProcessingError) else str(error)


_REQUEST_ID = istr("X-Request-Id")  # not folded anew for each request
_ID_BITS = 128
_SANE_ID = re.compile(r"[!-~]{1,128}")


def is_generating(request: web.BaseRequest | None) -> bool:
    """Whether the answer of ``request`` is a stream that has not ended."""
    call = None if request is None else request.get(CALL)
    return call is not None and call.generating


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is printable and short, otherwise a new one."""
    given = headers.get(_REQUEST_ID)
    if given and _SANE_ID.fullmatch(given):
        return given
    return f"{random.getrandbits(_ID_BITS):032x}"


_GRACE_S = 1.0
"""A client has this long to read the last bytes."""


async def _write_last(request: web.Request, response: web.StreamResponse, last: bytes) -> None:
    slow = _abort_later(request)
    try:
        await response.write_eof(last)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # A write that the time limit cancelled left its cancelled waiter in aiohttp, which this
        # write met. Its data is on the way, but the connection cannot be used again.
        _close(request)
    else:
        slow.cancel()


def _close(request: web.Request) -> None:
    """Close the connection once everything is sent."""
    if request.transport is not None:
        request.transport.close()


def _abort_later(request: web.Request) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(_GRACE_S, _abort, request)


def _abort(request: web.Request) -> None:
    """Drop the connection, sent or not. A lost connection has no transport."""
    if request.transport is not None:
        request.transport.abort()
