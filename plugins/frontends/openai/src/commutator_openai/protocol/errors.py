"""Every failure in OpenAI's error shape: its status, its code and its message."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from aiohttp import web
from attrs import field, frozen

from commutator.contract.limiter import Standing
from commutator.errors import (
    AuthenticationError,
    CommutatorError,
    DeadlineError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    EngineUnavailableError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RegistryError,
    RequestError,
    RoutingError,
)
from commutator_openai.protocol.rate_limits import rate_limits
from commutator_openai.protocol.responses import ErrorBody, ErrorDetail

__all__ = [
    "HttpError",
    "error_response",
    "log_failure",
    "to_http_error",
]

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_LONGEST_FOLLOWED_S = 60
"""OpenAI's clients ignore a longer ``Retry-After``. A minute's window ends up to a second later: a
client that comes that much too early is told to wait for the rest."""

_NOT_FOUND = {"model_not_found", "worker_not_found"}
_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


@frozen
class HttpError(Exception):
    """An answer that is not 200."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(factory=dict)

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        if self.status == web.HTTPUnauthorized.status_code:
            return "authentication_error"
        if self.status == web.HTTPForbidden.status_code:
            return "permission_error"
        if self.status == web.HTTPTooManyRequests.status_code:
            return "rate_limit_error"
        client_fault = self.status < web.HTTPInternalServerError.status_code
        return "invalid_request_error" if client_fault else "server_error"

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(self.message, self.kind, self.param, self.code))
        )


def to_http_error(error: BaseException, request_id: str) -> HttpError:
    """The answer to ``error``. It shows nothing of errors that Commutator does not raise itself."""
    match error:
        case HttpError():
            return error
        case AuthenticationError():
            return HttpError(
                web.HTTPUnauthorized.status_code,
                str(error),
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        case PermissionDeniedError():
            status = web.HTTPForbidden.status_code
            return HttpError(status, str(error), "permission_denied", error.param)
        case RequestError():
            status = 404 if error.code in _NOT_FOUND else 400
            return HttpError(status, str(error), error.code or "invalid_value", error.param)
        case RateLimitError() | OverloadedError() | RegistryError() | RoutingError():
            return _not_now(error)
        case DeadlineError():
            return HttpError(504, str(error), "deadline_exceeded")
        case web.HTTPException():
            return _from_aiohttp(error)
        case CommutatorError():
            return _from_worker(error, request_id)
        case _:
            text = f"internal error; see the log under request id {request_id}"
            return HttpError(500, text, "internal_error")


def error_response(error: HttpError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error.body(),
        content_type="application/json",
        headers=error.headers,
    )


def log_failure(error: BaseException, answer: HttpError, request_id: str) -> None:
    """Log what the answer hides, with a traceback if the error was not raised on purpose."""
    if answer.status < web.HTTPInternalServerError.status_code:
        return
    if isinstance(error, CommutatorError):
        log.warning("request %s: %s: %s", request_id, type(error).__name__, error)
    else:
        log.error("request %s failed unexpectedly", request_id, exc_info=error)


def _later(
    status: int, message: str, code: str, retry_after_s: float = _RETRY_AFTER_S
) -> HttpError:
    headers = {"Retry-After": str(max(1, round(retry_after_s)))}
    return HttpError(status, message, code, headers=headers)


def _not_now(
    error: RateLimitError | OverloadedError | RegistryError | RoutingError,
) -> HttpError:
    match error:
        case RateLimitError():
            return _rate_limited(error)
        case OverloadedError():
            return _later(429, str(error), error.reason, error.retry_after_s)
        case RegistryError():  # only the ledger of limits is asked while a request runs
            return _later(503, str(error), "limits_unavailable")
        case RoutingError():
            return _later(503, str(error), "no_worker")


def _rate_limited(error: RateLimitError) -> HttpError:
    if error.retry_after_s is None:
        # By OpenAI's clients understood as: do not send it again.
        headers = {"x-should-retry": "false"}
    else:
        wait_s = max(1, math.ceil(error.retry_after_s))
        if wait_s - 1 == _LONGEST_FOLLOWED_S:
            wait_s = _LONGEST_FOLLOWED_S
        headers = {"Retry-After": str(wait_s)}
    if isinstance(error.standing, Standing):
        headers.update(rate_limits(error.standing))
    return HttpError(429, str(error), "rate_limit_exceeded", headers=headers)


def _from_worker(error: CommutatorError, request_id: str) -> HttpError:
    match error:
        case EngineOverloadedError():
            return _later(429, "every worker is busy; try again soon", "workers_busy")
        case EngineUnavailableError():
            return _later(503, "the worker was lost; try again", "worker_lost")
        case EngineNeedsPrefillError():
            text = (
                "this model's decode workers need a prefill worker, and none took this request; "
                f"start one, or try again once one is ready; see the log under {request_id}"
            )
            return _later(503, text, "no_prefill_worker")
    text = f"the worker failed this request; see the log under {request_id}"
    return HttpError(500, text, "worker_failed")


def _from_aiohttp(error: web.HTTPException) -> HttpError:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"method {error.method} is not allowed here; allowed: {allowed}"
        case web.HTTPRequestEntityTooLarge():
            text = f"the body is too large: {error.text}"
        case web.HTTPNotFound():
            text = "no such path; GET /openapi.json lists the paths"
        case _:
            text = error.text or error.reason
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    code = _CODES.get(error.status, f"http_{error.status}")
    return HttpError(error.status, text, code, headers=headers)
