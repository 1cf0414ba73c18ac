"""What happens around every request: its id, its errors, its log line, its metrics, its key."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from commutator.frontend.ending import end_failed
from commutator.frontend.errors import HttpError, error_response, log_failure, to_http_error
from commutator.frontend.exchange import EXCHANGE, Exchange, request_id_of
from commutator.frontend.services import SERVICES

__all__ = ["add_headers", "exchange", "require_key"]

log = logging.getLogger(__name__)

_CLIENT_GONE = 499
_OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/metrics", "/openapi.json"})


@web.middleware
async def exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: whatever is raised inside becomes an answer in OpenAI's shape.

    Of a response that has begun it becomes the end.
    """
    services = request.app[SERVICES]
    known = request[EXCHANGE] = Exchange(services, request_id_of(request), _endpoint(request))
    code = _CLIENT_GONE
    try:
        response = await handler(request)
        code = response.status
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it must be answered
        answer = to_http_error(error, known.request_id)
        log_failure(error, answer, known.request_id)
        code = answer.status
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


def require_key(keys: Sequence[str]) -> Middleware:
    """Lets only requests with one of ``keys`` as bearer token reach what is not open to all."""
    accepted = [key.encode() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS and not _has_key(request, accepted):
            raise HttpError(
                web.HTTPUnauthorized.status_code,
                "expected the header Authorization: Bearer KEY with a key that is known here",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return check


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Put on every response, streams too, what was noted for it on the way."""
    known = request.get(EXCHANGE)
    if known is not None:
        known.begun = response
        response.headers["X-Request-Id"] = known.request_id
        response.headers.update(known.headers)
    services = request.app[SERVICES] if known is None else known.services
    if services.draining:
        # The client's next request must find another front door. The headers are made already.
        response.force_close()
        response.headers["Connection"] = "close"


def _has_key(request: web.Request, accepted: Sequence[bytes]) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip().encode(errors="surrogateescape")
    # Every key is compared, each in constant time, so that timing tells nothing.
    matches = [hmac.compare_digest(given, key) for key in accepted]
    return scheme.lower() == "bearer" and any(matches)


def _endpoint(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


def _read_no_further(request: web.Request, response: web.StreamResponse) -> None:
    """The body is broken: aiohttp would read the rest, fail, and log that as its own failure."""
    request.content.feed_eof()
    response.force_close()


def _record(request: web.Request, known: Exchange, code: int) -> None:
    duration_s = time.perf_counter() - known.arrived_s
    known.services.metrics.request_done(known.endpoint, known.model, code, duration_s)
    level = logging.DEBUG if request.path in _OPEN_PATHS else logging.INFO
    if log.isEnabledFor(level):
        log.log(level, "%s", known.log_line(code, duration_s))
