"""Around every request: its id, key check, error shape, headers, metrics and log line."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from attrs import define, field
from multidict import istr

from commutator.contract.limiter import Ticket
from commutator.contract.observer import AnsweredRequest
from commutator.contract.principal import ANONYMOUS, Credentials, Principal
from commutator.contract.request import Caller
from commutator.errors import PermissionDeniedError, RateLimitError, RequestError
from commutator.frontend import (
    ADMIN_PREFIX,
    OPERATIONS_PATHS,
    PROBE_PATHS,
    WORKING_FOR,
    FrontendServices,
    TimeLimit,
    local_user,
    require,
)
from commutator_openai.protocol.chunks import event
from commutator_openai.protocol.errors import HttpError, error_response, log_failure, to_http_error
from commutator_openai.protocol.rate_limits import rate_limits
from commutator_openai.protocol.requests import TIMEOUT_HEADER
from commutator_openai.strangers import Strangers
from commutator_openai.ui import PAGE_PATHS

__all__ = [
    "EXCHANGE",
    "FORWARD_HEADERS",
    "SERVICES",
    "STRANGERS",
    "ClientConnection",
    "Exchange",
    "add_headers",
    "administrator",
    "authenticate",
    "authenticate_administrator",
    "caller",
    "end_failed",
    "exchange",
    "explain_routing",
    "is_generating",
    "live_reader",
    "name_workers",
    "own_user",
    "request_id_of",
    "time_limit",
]

log = logging.getLogger(__name__)

SERVICES: web.AppKey[FrontendServices] = web.AppKey("services", FrontendServices)

STRANGERS: web.AppKey[Strangers] = web.AppKey("strangers", Strangers)

FORWARD_HEADERS: web.AppKey[tuple[str, ...]] = web.AppKey("forward_headers", tuple)
"""The headers that routing policies and observers see, in lower case."""


class ClientConnection:
    """A connection that is told when it waits for its client; see ``commutator_openai.server``."""

    __slots__ = ()

    def knows_client(self) -> None:
        """A request on it had a key that is known here."""

    def waits_for_client(self) -> None:
        """A part of the request is still to come, or the answer is not read.

        The connection may be closed for another one.
        """

    def works_for_client(self) -> None:
        """The request is complete, and what there is of an answer is read."""


_CLIENT_GONE = 499
_REFUSED = frozenset({403, 429})
_MAX_PATH = 256
_OTHER = "other"
"""Stands for every path that is none of ours."""
_MAX_HEADER = 256
_EXPLAIN_HEADER = "X-Commutator-Explain"
_EXPLAIN = istr(_EXPLAIN_HEADER)  # not folded anew for each request
_NOT_LOGGED = OPERATIONS_PATHS | PROBE_PATHS | PAGE_PATHS
_WITHOUT_KEY = PROBE_PATHS | PAGE_PATHS


@web.middleware
async def exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: answers every exception in OpenAI's shape.

    If the response has already begun, the error ends it.
    """
    services = request.app[SERVICES]
    known = request[EXCHANGE] = Exchange(
        services, request_id_of(request), _endpoint(request), path=request.path
    )
    code = _CLIENT_GONE
    try:
        try:
            response = await handler(request)
        finally:
            if known.counts:
                tokens = known.prompt_tokens + known.generated_tokens if known.served else None
                services.request_limiter.end(known.principal, known.ticket, tokens)
        code = response.status
    except (asyncio.CancelledError, ConnectionError):
        if known.begun is not None and known.sent:
            code = known.begun.status
        raise
    except Exception as error:  # noqa: BLE001 - any error must be answered
        answer = to_http_error(error, known.request_id)
        log_failure(error, answer, known.request_id)
        code = answer.status
        known.reason = error.limit if isinstance(error, RateLimitError) else answer.code
        known.param = answer.param
        if known.begun is not None:
            response = known.begun
            await end_failed(request, response, answer)
        else:
            if code == web.HTTPTooManyRequests.status_code and answer.code is not None:
                services.metrics.request_rejected(known.model, answer.code)
            response = error_response(answer)
    finally:
        _record(request, known, code)
    if request.content.exception() is not None:
        _read_no_further(request, response)
    return response


@web.middleware
def authenticate(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
    """Finds the principal, asks for its permissions and begins to count the request.

    Probes and the page's files need no key. No coroutine of its own: every request comes here.
    """
    known = request[EXCHANGE]
    if known.path in _WITHOUT_KEY:
        return handler(request)
    principal = known.services.gate.known.get(request.headers.get(hdrs.AUTHORIZATION, ""))
    if principal is None:  # not by its key alone
        return _authenticated(request, known, handler)
    _begin(request, known, principal)
    return handler(request)


async def _authenticated(
    request: web.Request, known: Exchange, handler: Handler
) -> web.StreamResponse:
    _begin(request, known, await _asked(request, known))
    return await handler(request)


def _begin(request: web.Request, known: Exchange, principal: Principal) -> None:
    path, services = known.path, known.services
    known.principal = principal
    if principal is not ANONYMOUS and isinstance(request.protocol, ClientConnection):
        request.protocol.knows_client()
    WORKING_FOR.set(principal.name)
    if path in OPERATIONS_PATHS and request.match_info.http_exception is None:
        require(principal, "metrics")
    if request.method == "POST":
        if request.headers.get(_EXPLAIN) == "1":
            require(principal, "explain", _EXPLAIN_HEADER)
        if not path.startswith(ADMIN_PREFIX):
            known.counts = services.request_limiter.begin(principal)


@web.middleware
async def authenticate_administrator(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the principal of a request that may change the deployment; asks nobody else."""
    if request.path.startswith(ADMIN_PREFIX):
        known = request[EXCHANGE]
        known.principal = await _asked(request, known)
        WORKING_FOR.set(known.principal.name)
    return await handler(request)


def administrator(request: web.Request) -> str:
    """The name of the principal, if it may change the deployment; else PermissionDeniedError."""
    principal = request[EXCHANGE].principal
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
    principal = request[EXCHANGE].principal
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


async def _asked(request: web.Request, known: Exchange) -> Principal:
    """The principal by all authenticators. Raises AuthenticationError."""
    credentials = Credentials(
        bearer=_bearer(request), headers=request.headers, peer=request.remote or None
    )
    return await known.services.gate.principal(credentials)


def caller(request: web.Request, *, user: str | None, session_id: str | None) -> Caller:
    """The sender of ``request``, for routing policies and observers."""
    names, sent = request.app[FORWARD_HEADERS], request.headers
    headers = {name: sent[name][:_MAX_HEADER] for name in names if name in sent}
    principal = request[EXCHANGE].principal
    if principal is ANONYMOUS:
        return Caller(user=user, session_id=session_id, headers=headers)
    return Caller(
        user=user,
        session_id=session_id,
        principal=principal.name,
        weight=principal.weight,
        headers=headers,
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id and the collected headers, to streams as well."""
    known = request.get(EXCHANGE)
    if known is not None:
        known.begun = response
        headers = response.headers
        headers["X-Request-Id"] = known.request_id
        headers.update(known.headers)
        if known.ticket is not None:
            headers.update(rate_limits(known.ticket.standing))
    services = request.app[SERVICES] if known is None else known.services
    if services.draining:
        # The client's next request must reach another front door. The headers exist already.
        response.force_close()
        response.headers["Connection"] = "close"


def _endpoint(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return _OTHER if resource is None else resource.canonical


def _read_no_further(request: web.Request, response: web.StreamResponse) -> None:
    """Keep aiohttp from reading the rest of a broken body and logging that as its own failure."""
    request.content.feed_eof()
    response.force_close()


def _record(request: web.Request, known: Exchange, code: int) -> None:
    duration_s = time.perf_counter() - known.arrived_s
    services, principal = known.services, None
    services.metrics.request_done(known.endpoint, known.model, code, duration_s)
    if known.principal is not ANONYMOUS:
        principal = known.principal.name
        services.metrics.principal_usage.add(
            (principal,), 1, known.prompt_tokens, known.cached_tokens, known.generated_tokens
        )
        if code in _REFUSED and known.reason is not None:
            services.metrics.principal_refused(principal, known.reason)
    is_quiet = request.path in _NOT_LOGGED
    if not (is_quiet and code < web.HTTPBadRequest.status_code):
        services.observer.request_answered(
            AnsweredRequest(
                request_id=known.request_id,
                principal=principal,
                peer=request.remote or local_user(request),
                method=request.method,
                path=request.path[:_MAX_PATH],
                model=known.model,
                status=code,
                reason=known.reason,
                workers=known.workers,
                prompt_tokens=known.prompt_tokens,
                cached_tokens=known.cached_tokens,
                generated_tokens=known.generated_tokens,
                duration_s=duration_s,
                body=known.body,
            )
        )
    level = logging.DEBUG if is_quiet else logging.INFO
    if code == web.HTTPUnauthorized.status_code and not request.app[STRANGERS].add(
        "requests without a valid key", request.remote or ""
    ):
        level = logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", known.log_line(code, duration_s))


_ID_BITS = 128
_SANE_ID = re.compile(r"[!-~]{1,128}")


@define
class Exchange:
    """What the log line and the metrics say about a request at its end."""

    services: FrontendServices
    request_id: str
    endpoint: str
    arrived_s: float = field(factory=time.perf_counter)
    principal: Principal = ANONYMOUS
    """Who sent it; ``ANONYMOUS`` where nobody is asked, and until the client was."""
    counts: bool = False
    """Whether the request counts against limits of its principal."""
    ticket: Ticket | None = None
    """Once it is charged."""
    path: str = ""
    """As the client wrote it."""
    reason: str | None = None
    """Why it was refused or failed."""
    param: str | None = None
    """What of the request was wrong."""
    body: bytes = b""
    model: str = ""
    """Set once a served model is found."""
    user: str | None = None
    begun: web.StreamResponse | None = None
    """The response, once its headers are sent: an error from then on can only end it."""
    ended: bool = False
    """Its last bytes are written, though perhaps not sent."""
    sent: bool = False
    """Its last bytes are the network's: a client that leaves from then on may have read it all."""
    served: bool = False
    """Whether it came to a worker; else it is not charged."""
    generating: bool = False
    """A worker may still be generating the answer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float | None = None
    workers: tuple[str, ...] = ()
    headers: dict[str, str] = field(factory=dict)
    """To be added to the response."""

    async def end(self, response: web.StreamResponse, last: bytes = b"") -> None:
        """Write the ``last`` bytes of ``response``."""
        self.ended = True
        await response.write_eof(last)
        self.sent = True

    def used(self, prompt: int, cached: int, generated: int) -> None:
        """A worker took the request; tokens so far."""
        self.served = True
        self.prompt_tokens, self.cached_tokens, self.generated_tokens = prompt, cached, generated

    def log_line(self, code: int, duration_s: float) -> str:
        """One line; values from clients are quoted."""
        parts = [f"{self.endpoint} {code} id={self.request_id} took={duration_s:.3f}s"]
        if self.endpoint == _OTHER:
            parts.append(f"path={json.dumps(self.path[:_MAX_PATH])}")
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        if self.param is not None:
            parts.append(f"param={json.dumps(self.param[:128])}")
        if self.model:
            parts.append(f"model={self.model}")
        if self.workers:
            parts.append(f"worker={','.join(self.workers)}")
            parts.append(
                f"tokens={self.prompt_tokens}+{self.generated_tokens} cached={self.cached_tokens}"
            )
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}s")
        if self.principal is not ANONYMOUS:
            parts.append(f"principal={self.principal.name}")
        if self.user is not None:
            parts.append(f"user={json.dumps(self.user[:128])}")
        return " ".join(parts)


EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)


def is_generating(request: web.BaseRequest | None) -> bool:
    """Whether the answer of ``request`` is a stream that has not ended."""
    known = None if request is None else request.get(EXCHANGE)
    return known is not None and known.generating


def request_id_of(request: web.BaseRequest) -> str:
    """The client's X-Request-Id if it is printable and short, otherwise a new one."""
    given = request.headers.get("X-Request-Id")
    if given and _SANE_ID.fullmatch(given):
        return given
    return f"{random.getrandbits(_ID_BITS):032x}"


_GRACE_S = 1.0
"""A client has this long to read the last bytes."""


async def end_failed(request: web.Request, response: web.StreamResponse, answer: HttpError) -> None:
    """End a stream of events with an error event, any other response by closing the connection.

    Raises ConnectionError when the client has disconnected.
    """
    if response.content_type == "text/event-stream" and not request[EXCHANGE].ended:
        await _write_last(request, response, event(answer.body()))
    else:
        _abort_later(request)
        _close(request)


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


Explanations = list[dict[str, Any]]

# Proxies and clients refuse longer headers.
_MAX_HEADER_CHARACTERS = 6_000
_MAX_REASON_CHARACTERS = 200


def name_workers(exchange: Exchange, workers: Sequence[str]) -> None:
    """Name the workers in the answer's headers to those who may know."""
    if exchange.principal.may("explain"):
        exchange.headers["X-Commutator-Worker"] = ",".join(workers)


def explain_routing(request: web.Request, explain: Callable[[], Explanations]) -> None:
    """Answer with ``X-Commutator-Decision`` if the client asked for it."""
    if request.headers.get(_EXPLAIN) == "1":
        request[EXCHANGE].headers["X-Commutator-Decision"] = _in_one_header(explain())


def _in_one_header(explanations: Explanations) -> str:
    """Compact JSON: an object, or for several answers a list of them, cut to what fits."""
    text = _compact(explanations)
    if len(text) > _MAX_HEADER_CHARACTERS:
        # The chosen worker matters most, so leave the others out.
        for one in explanations:
            chosen = [c for c in one["candidates"] if c["worker_id"] == one["worker_id"]]
            left_out = len(one["candidates"]) - len(chosen)
            one["left_out"] = left_out + one.get("left_out", 0)
            one["candidates"] = chosen
            one["reason"] = one["reason"][:_MAX_REASON_CHARACTERS]
        while len(text := _compact(explanations)) > _MAX_HEADER_CHARACTERS:
            explanations = explanations[: len(explanations) // 2]
    return text


def _compact(shown: Explanations) -> str:
    return json.dumps(shown[0] if len(shown) == 1 else shown, separators=(",", ":"))


def time_limit(request: web.Request) -> TimeLimit:
    """The deadline of ``request``: the server's, or an earlier one that the client sent.

    Raises RequestError when the header is not a positive number.
    """
    services = request[EXCHANGE].services
    return services.time_limits.of(_timeout_s(request, services.config.request_timeout_s))


def _timeout_s(request: web.Request, longest_s: float) -> float:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0:  # also false for NaN
        raise RequestError(
            f"{TIMEOUT_HEADER}: expected a number of seconds above 0, got {given[:40]!r}",
            TIMEOUT_HEADER,
        )
    return min(timeout_s, longest_s)
