"""Around every request: its call, key check, error shape, headers, metrics and log line."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from commutator.contract.answer import Failure
from commutator.contract.operations import OPERATIONS_PREFIX
from commutator.contract.principal import ANONYMOUS, Credentials, Principal
from commutator.contract.protocol import MountedProtocol
from commutator.errors import PermissionDeniedError, RateLimitError
from commutator.frontend import WORKING_FOR, Call, log_failure, require, to_failure
from commutator_http.administration import local_user
from commutator_http.call import (
    CALL,
    DOOR,
    OTHER,
    WEBSOCKET,
    ClientConnection,
    DoorParts,
    HttpCall,
    MountedRoute,
    close_after,
)
from commutator_http.health import OPERATIONS_PATHS

log = logging.getLogger(__name__)

_CLIENT_GONE = 499
_UNAUTHORIZED = 401
_TOO_MANY = 429
_FIRST_ERROR = 400
_NO_TEXT = web.HTTPNotFound().text
_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


def find_answer(
    parts: DoorParts, app_handler: Handler, request: web.Request
) -> Awaitable[web.StreamResponse]:
    """The answer to a request: at once where it is a protocol's, else as the application finds it.

    aiohttp's way through router, signals and middlewares takes a tenth of a short request's time.
    """
    route = parts.routes.get((request.method, request.rel_url.raw_path))
    if route is None or hdrs.EXPECT in request.headers:
        return app_handler(request)
    call = HttpCall(request, parts, route.path, route.path, route.protocol)
    return _exchange(call, route, app_handler)


@web.middleware
def exchange(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
    """The outermost middleware: answers every exception in the shape of the route's protocol."""
    return _exchange(HttpCall.of(request), None, handler)


async def _exchange(
    call: HttpCall, route: MountedRoute | None, handler: Handler
) -> web.StreamResponse:
    """The answer of ``route``, or else of ``handler``.

    If the response has already begun, an error ends it.
    """
    request = call.request
    request[CALL] = call
    code = _CLIENT_GONE
    try:
        try:
            if call.parts_of_door.hosts is not None:
                call.parts_of_door.hosts.check(call.headers.get(hdrs.HOST))
            if call.method == "POST" and hdrs.ORIGIN in call.headers:
                call.check_origin()
            if route is None:
                response = await handler(request)
            else:
                if call.parts_of_door.identifies:
                    await _identify(call)
                await route.answer(call)
                response = call.answered
        finally:
            call.settle()
        code = response.status
    except (asyncio.CancelledError, ConnectionError):
        if call.response is not None and call.sent:
            code = call.response.status
        raise
    except Exception as error:  # noqa: BLE001 - any error must be answered
        failure = noted(call, error)
        code = failure.status
        response = await _failed(call, failure)
    finally:
        _account(request, call, code)
    if not response.prepared:
        call.add_headers(response)
    if request.content.exception() is not None:
        # Else aiohttp would read the rest of a broken body, and log that as its own failure.
        request.content.feed_eof()
        response.force_close()
    return response


def noted(call: Call, error: Exception) -> Failure:
    """What ``error`` is for the client, once log and metrics know of it."""
    failure = from_aiohttp(error, call) if isinstance(error, web.HTTPException) else None
    failure = failure or to_failure(error, call.request_id)
    call.reason = error.limit if isinstance(error, RateLimitError) else failure.code
    call.param = failure.param
    log_failure(error, failure, call.request_id)
    if failure.status == _TOO_MANY and failure.code is not None and not call.begun:
        call.services.metrics.request_rejected(call.model, failure.code)
    return failure


async def _failed(call: HttpCall, failure: Failure) -> web.StreamResponse:
    """What says so to the client."""
    if call.begun:
        await call.end_failed(failure)
        return call.answered
    return failure_response(failure, call.protocol)


def failure_response(failure: Failure, protocol: MountedProtocol | None) -> web.Response:
    """The answer to a request that failed, in the shape of ``protocol``, if there is one."""
    if protocol is None:
        said = {"message": failure.message, "code": failure.code, "param": failure.param}
        body, content_type = msgspec.json.encode({"error": said}), MountedProtocol.failed_type
    else:
        body, content_type = protocol.failed(failure), protocol.failed_type
    headers = {**failure.headers, hdrs.CONTENT_TYPE: content_type}
    return web.Response(status=failure.status, body=body, headers=headers)


_SHOWN = 80
"""Characters of a client's path in an error message."""


def _paths_hint(call: Call) -> str:
    """The path that was probably meant, or what clients are served at this door."""
    routes = call.parts_of_door.routes if isinstance(call, HttpCall) else {}
    known = sorted(
        {path for _, path in routes if not path.endswith("/")},
        key=lambda path: (not path.startswith("/v1/"), path),
    )
    if close := difflib.get_close_matches(call.path[:_SHOWN], known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    if not known:
        return "this door is for operators"
    more = f", and {len(known) - _PATHS} more" if len(known) > _PATHS else ""
    return f"there are: {', '.join(known[:_PATHS])}{more}"


_PATHS = 6


def from_aiohttp(error: web.HTTPException, call: Call) -> Failure:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"method {error.method} is not allowed here; allowed: {allowed}"
        case web.HTTPRequestEntityTooLarge():
            text = f"the body is too large: {error.text}"
        case web.HTTPNotFound() if error.text == _NO_TEXT:
            text = f"{call.path[:_SHOWN]} is not served here; {_paths_hint(call)}"
        case _:
            text = error.text or error.reason
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    code = _CODES.get(error.status, f"http_{error.status}")
    return Failure(error.status, text, code, headers=headers)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the principal of a request; probes and the page's files need no key."""
    call = request[CALL]
    if call.path not in call.parts_of_door.files:
        await _identify(call)
    return await handler(request)


async def _identify(call: HttpCall) -> None:
    """Finds the principal, asks for its permissions and begins to count the request."""
    await begin(call, call)


async def begin(call: Call, sent_by: HttpCall) -> None:
    """Find the principal of ``sent_by``, which ``call`` came with, and begin to count ``call``."""
    principal = sent_by.parts_of_door.gate.known.get(call.headers.get(hdrs.AUTHORIZATION, ""))
    if principal is None:  # not by its key alone
        principal = await _asked(sent_by)
    connection = sent_by.request.protocol
    call.principal = principal
    if principal is not ANONYMOUS and isinstance(connection, ClientConnection):
        connection.knows_client()
    WORKING_FOR.set(principal.name)
    if call.path in OPERATIONS_PATHS and call.endpoint != OTHER:
        require(principal, "metrics")
    if call.method in ("POST", WEBSOCKET):
        if call.explains:
            require(principal, "explain", "X-Commutator-Explain")
        if not call.path.startswith(OPERATIONS_PREFIX):
            call.counts = call.services.request_limiter.begin(principal)


@web.middleware
async def authenticate_administrator(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the principal of a request that may change the deployment; asks nobody else."""
    if request.path.startswith(OPERATIONS_PREFIX):
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
    if principal is not ANONYMOUS:
        require(principal, "admin")
    elif not _from_this_machine(request):
        raise PermissionDeniedError(
            "without keys, the live view is shown only on the deployment's own machine, under "
            "localhost or 127.0.0.1: open it there (ssh -L), or give somebody the permission "
            '"admin" in the section `auth`'
        )
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


def bearer_of(headers: Mapping[str, str]) -> str | None:
    """The key that a client sent; None: it sent none. Names of ``headers`` are in any case."""
    given = headers.get(hdrs.AUTHORIZATION)
    if given is None:  # some clients name the key alone
        return headers.get("X-Api-Key", "").strip() or None
    scheme, _, token = given.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


async def _asked(call: HttpCall) -> Principal:
    """The principal by all authenticators. Raises AuthenticationError."""
    request = call.request
    credentials = Credentials(
        bearer=bearer_of(request.headers), headers=request.headers, peer=request.remote or None
    )
    return await call.parts_of_door.gate.principal(credentials)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Before a response of the application is sent; one to an unknown expectation has no call."""
    parts, call = request.app[DOOR], request.get(CALL)
    if call is not None:
        call.response = response
        call.add_headers(response)
        return
    if parts.cors is not None:
        parts.cors.add_headers(request, response)
    if parts.services.draining:
        close_after(response)


def _account(request: web.Request, call: HttpCall, code: int) -> None:
    is_quiet = call.path in call.parts_of_door.files or call.path in OPERATIONS_PATHS
    if code == _UNAUTHORIZED and not call.parts_of_door.strangers.add(
        "requests without a valid key", request.remote or ""
    ):
        is_quiet = True
    user = None if call.peer is not None else local_user(request)
    call.account(code, is_quiet=is_quiet, local_user=user)
