"""Around every request: its call, key check, error shape, headers, metrics and log line."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from commutator.contract.answer import Failure
from commutator.contract.principal import ANONYMOUS, Credentials, Principal
from commutator.contract.protocol import MountedProtocol
from commutator.errors import PermissionDeniedError, RateLimitError
from commutator.frontend import (
    ADMIN_PREFIX,
    OPERATIONS_PATHS,
    PROBE_PATHS,
    WORKING_FOR,
    Call,
    FrontendServices,
    Gate,
    local_user,
    log_failure,
    rate_limits,
    require,
    to_failure,
)
from commutator_http.body import BodyLimits, ClientConnection, read_body, room_for_body
from commutator_http.strangers import Strangers

__all__ = [
    "CALL",
    "DOOR",
    "DoorParts",
    "HttpCall",
    "add_headers",
    "administrator",
    "authenticate",
    "authenticate_administrator",
    "exchange",
    "failure_response",
    "from_aiohttp",
    "is_generating",
    "live_reader",
    "own_user",
]

log = logging.getLogger(__name__)

_CLIENT_GONE = 499
_UNAUTHORIZED = 401
_TOO_MANY = 429
_FIRST_ERROR = 400
_OTHER = "other"
"""Stands for every path that is none of ours."""
_NO_TEXT = web.HTTPNotFound().text
_PART_BYTES = 256 << 10
_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


class DoorParts:
    """What the requests of one application share."""

    def __init__(
        self,
        services: FrontendServices,
        gate: Gate,
        limits: BodyLimits,
        forward_headers: Sequence[str],
        default: MountedProtocol | None = None,
    ) -> None:
        """``default``: the protocol in whose shape errors are said where no route is found."""
        self.services = services
        self.gate = gate
        self.limits = limits
        self.forward_headers = tuple(forward_headers)
        self.default = default
        self.protocols: dict[Handler, MountedProtocol] = {}
        """By the handlers of their routes."""
        self.files = {*PROBE_PATHS, "/", "/ui"}
        """Paths that need no key: of probes, and of files without any data of the deployment. Also
        where there is no page: a browser sends no key, and hears so."""
        self.strangers = Strangers()


DOOR: web.AppKey[DoorParts] = web.AppKey("door", DoorParts)


class _Response(web.StreamResponse):
    # The first piece follows its headers at once: one packet, as with aiohttp's own web.Response.
    _send_headers_immediately = False


class HttpCall(Call):
    """A request over HTTP."""

    def __init__(self, request: web.Request, parts: DoorParts) -> None:
        resource = request.match_info.route.resource
        super().__init__(
            parts.services,
            request_id_of(request),
            _OTHER if resource is None else resource.canonical,
            request.method,
            request.path,
        )
        self.request = request
        self.parts_of_door = parts
        self.protocol = parts.protocols.get(request.match_info.handler, parts.default)
        self.response: web.StreamResponse | None = None
        """The answer, once there is one."""
        self.ended = False
        """Its last bytes are written, though perhaps not sent."""
        self.sent = False
        """Its last bytes are the network's: a client that leaves from then on may have read it."""
        self._failed: Callable[[Failure], bytes] | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

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
        return self.request.match_info

    def room_for_body(self) -> AbstractAsyncContextManager[None]:
        return room_for_body(self.request, self, self.parts_of_door.limits)

    async def read(self) -> bytes:
        self.body = await read_body(self.request, self.parts_of_door.limits)
        return self.body

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
        await response.prepare(self.request)
        parts.reverse()
        while parts:
            await self._write_in_parts(response, parts.pop())
            await asyncio.sleep(0)  # a client that reads fast does not keep the others waiting
        await response.write_eof()

    async def begin(
        self,
        content_type: str,
        status: int = 200,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        self._failed = failed
        headers: dict[str, str] = {hdrs.CONTENT_TYPE: content_type}
        if failed is not None:
            headers |= _STREAM_HEADERS
        self.response = _Response(status=status, headers=headers)

    async def write(self, data: bytes) -> None:
        response = self.response
        assert response is not None, "begin comes first"
        if not response.prepared:
            await response.prepare(self.request)
        if len(data) <= _PART_BYTES:
            await response.write(data)
        else:
            await self._write_in_parts(response, data)

    async def end(self, last: bytes = b"") -> None:
        response = self.response
        assert response is not None, "begin comes first"
        if not response.prepared:
            await response.prepare(self.request)
        self.ended = True
        await response.write_eof(last)
        self.sent = True

    @property
    def begun(self) -> bool:
        return self.response is not None and self.response.prepared

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


@web.middleware
async def exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: answers every exception in the shape of the route's protocol.

    If the response has already begun, the error ends it.
    """
    call = request[CALL] = HttpCall(request, request.app[DOOR])
    code = _CLIENT_GONE
    try:
        try:
            response = await handler(request)
        finally:
            call.settle()
        code = response.status
    except (asyncio.CancelledError, ConnectionError):
        if call.response is not None and call.sent:
            code = call.response.status
        raise
    except Exception as error:  # noqa: BLE001 - any error must be answered
        answer = from_aiohttp(error) if isinstance(error, web.HTTPException) else None
        answer = answer or to_failure(error, call.request_id)
        log_failure(error, answer, call.request_id)
        code = answer.status
        call.reason = error.limit if isinstance(error, RateLimitError) else answer.code
        call.param = answer.param
        if call.begun:
            assert call.response is not None
            response = call.response
            await call.end_failed(answer)
        else:
            if code == _TOO_MANY and answer.code is not None:
                call.services.metrics.request_rejected(call.model, answer.code)
            response = failure_response(answer, call.protocol)
    finally:
        _account(request, call, code)
    if request.content.exception() is not None:
        _read_no_further(request, response)
    return response


def failure_response(failure: Failure, protocol: MountedProtocol | None) -> web.Response:
    """The answer to a request that failed, in the shape of ``protocol``, if there is one."""
    if protocol is None:
        said = {"message": failure.message, "code": failure.code, "param": failure.param}
        body = msgspec.json.encode({"error": said})
    else:
        body = protocol.failed(failure)
    return web.Response(
        status=failure.status, body=body, content_type="application/json", headers=failure.headers
    )


def from_aiohttp(error: web.HTTPException) -> Failure:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"method {error.method} is not allowed here; allowed: {allowed}"
        case web.HTTPRequestEntityTooLarge():
            text = f"the body is too large: {error.text}"
        case web.HTTPNotFound() if error.text == _NO_TEXT:
            text = "no such path; GET /openapi.json lists the paths"
        case _:
            text = error.text or error.reason
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    code = _CODES.get(error.status, f"http_{error.status}")
    return Failure(error.status, text, code, headers=headers)


@web.middleware
def authenticate(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
    """Finds the principal, asks for its permissions and begins to count the request.

    Probes and the page's files need no key. No coroutine of its own: every request comes here.
    """
    call = request[CALL]
    if call.path in call.parts_of_door.files:
        return handler(request)
    principal = call.parts_of_door.gate.known.get(request.headers.get(hdrs.AUTHORIZATION, ""))
    if principal is None:  # not by its key alone
        return _authenticated(request, call, handler)
    _begin(request, call, principal)
    return handler(request)


async def _authenticated(
    request: web.Request, call: HttpCall, handler: Handler
) -> web.StreamResponse:
    _begin(request, call, await _asked(call))
    return await handler(request)


def _begin(request: web.Request, call: HttpCall, principal: Principal) -> None:
    path, services = call.path, call.services
    call.principal = principal
    if principal is not ANONYMOUS and isinstance(request.protocol, ClientConnection):
        request.protocol.knows_client()
    WORKING_FOR.set(principal.name)
    if path in OPERATIONS_PATHS and request.match_info.http_exception is None:
        require(principal, "metrics")
    if call.method == "POST":
        if call.explains:
            require(principal, "explain", "X-Commutator-Explain")
        if not path.startswith(ADMIN_PREFIX):
            call.counts = services.request_limiter.begin(principal)


@web.middleware
async def authenticate_administrator(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the principal of a request that may change the deployment; asks nobody else."""
    if request.path.startswith(ADMIN_PREFIX):
        call = request[CALL]
        call.principal = await _asked(call)
        WORKING_FOR.set(call.principal.name)
    return await handler(request)


def administrator(request: web.Request) -> str:
    """The name of the principal, if it may change the deployment; else PermissionDeniedError."""
    principal = request[CALL].principal
    if principal is ANONYMOUS:
        raise PermissionDeniedError(
            "without keys, only the user who started the deployment may do this, on its machine: "
            'give somebody the permission "admin" in the section `auth`'
        )
    require(principal, "admin")
    return principal.name


def live_reader(request: web.Request) -> str:
    """The name of the principal, if it may see the live view; else PermissionDeniedError.

    Where nobody is asked who they are, only this machine's own browsers and commands may: neither
    pages of other sites, even under a name that leads to this machine, nor clients of a proxy.
    """
    principal = request[CALL].principal
    if principal is ANONYMOUS:
        if not _from_this_machine(request):
            raise PermissionDeniedError(
                "without keys, the live view is shown only on the deployment's own machine, under "
                "localhost or 127.0.0.1: open it there (ssh -L), or give somebody the permission "
                '"admin" in the section `auth`'
            )
        return principal.name
    require(principal, "admin")
    return principal.name


_THIS_SITE = frozenset({"same-origin", "none"})
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "Via")


def _from_this_machine(request: web.Request) -> bool:
    if request.headers.get("Sec-Fetch-Site", "none") not in _THIS_SITE:
        return False
    if any(name in request.headers for name in _OF_PROXIES):
        return False
    return _is_loopback(request.remote or "") and _is_loopback(_host(request))


def _host(request: web.Request) -> str:
    """The host that the client asked for, without the port."""
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def own_user(request: web.Request) -> str:
    """The sender of a request over the Unix socket, which only the run's own user reaches."""
    return local_user(request) or "unknown"


def _bearer(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


async def _asked(call: HttpCall) -> Principal:
    """The principal by all authenticators. Raises AuthenticationError."""
    request = call.request
    credentials = Credentials(
        bearer=_bearer(request), headers=request.headers, peer=request.remote or None
    )
    return await call.parts_of_door.gate.principal(credentials)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id and the collected headers, to streams as well."""
    call = request.get(CALL)
    if call is not None:
        call.response = response
        headers = response.headers
        headers["X-Request-Id"] = call.request_id
        headers.update(call.answer_headers)
        if call.ticket is not None:
            headers.update(rate_limits(call.ticket.standing))
    services = request.app[DOOR].services if call is None else call.services
    if services.draining:
        # The client's next request must reach another front door. The headers exist already.
        response.force_close()
        response.headers["Connection"] = "close"


def _read_no_further(request: web.Request, response: web.StreamResponse) -> None:
    """Keep aiohttp from reading the rest of a broken body and logging that as its own failure."""
    request.content.feed_eof()
    response.force_close()


def _account(request: web.Request, call: HttpCall, code: int) -> None:
    is_quiet = call.path in call.parts_of_door.files or call.path in OPERATIONS_PATHS
    if code == _UNAUTHORIZED and not call.parts_of_door.strangers.add(
        "requests without a valid key", request.remote or ""
    ):
        is_quiet = True
    user = None if call.peer is not None else local_user(request)
    call.account(code, is_quiet=is_quiet, local_user=user)


_ID_BITS = 128
_SANE_ID = re.compile(r"[!-~]{1,128}")


def is_generating(request: web.BaseRequest | None) -> bool:
    """Whether the answer of ``request`` is a stream that has not ended."""
    call = None if request is None else request.get(CALL)
    return call is not None and call.generating


def request_id_of(request: web.BaseRequest) -> str:
    """The client's X-Request-Id if it is printable and short, otherwise a new one."""
    given = request.headers.get("X-Request-Id")
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
