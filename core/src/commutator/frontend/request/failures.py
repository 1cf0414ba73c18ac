"""What clients are told whatever protocol they speak: failures, and how far their limits are."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping
from functools import lru_cache

from multidict import istr

from commutator.contract.answer import Failure
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

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
_SPREAD = 3.0
"""The longest wait that is asked for, times the shortest."""
_LONGEST_FOLLOWED_S = 60
"""OpenAI's clients ignore a longer ``Retry-After``. A minute's window ends up to a second later: a
client that comes that much too early is told to wait for the rest."""
_NOT_FOUND = {"model_not_found", "worker_not_found", "decision_not_found"}
_INTERNAL = 500


def to_failure(error: BaseException, request_id: str) -> Failure:
    """The answer to ``error``. It shows nothing of errors that Commutator does not raise itself."""
    match error:
        case Failure():
            return error
        case AuthenticationError():
            headers = {"WWW-Authenticate": "Bearer"}
            return Failure(401, str(error), "invalid_api_key", headers=headers)
        case PermissionDeniedError():
            return Failure(403, str(error), "permission_denied", error.param)
        case RequestError():
            status = 404 if error.code in _NOT_FOUND else 400
            return Failure(status, str(error), error.code or "invalid_value", error.param)
        case RateLimitError() | OverloadedError() | RegistryError() | RoutingError():
            return _not_now(error)
        case DeadlineError():
            return Failure(504, str(error), "deadline_exceeded")
        case CommutatorError():
            return _from_worker(error, request_id)
        case _:
            text = f"internal error; see the log under request id {request_id}"
            return Failure(_INTERNAL, text, "internal_error")


def log_failure(error: BaseException, answer: Failure, request_id: str) -> None:
    """Log what the answer hides, with a traceback if the error was not raised on purpose."""
    if answer.status < _INTERNAL:
        return
    if isinstance(error, CommutatorError):
        log.warning("request %s: %s: %s", request_id, type(error).__name__, error)
    else:
        log.error("request %s failed unexpectedly", request_id, exc_info=error)


def _later(status: int, message: str, code: str, retry_after_s: float = _RETRY_AFTER_S) -> Failure:
    # Those who are refused together do not come back together; OpenAI's clients read the second.
    wait_s = retry_after_s * random.uniform(1.0, _SPREAD)  # noqa: S311 - no secret
    headers = {"Retry-After": str(max(1, round(wait_s))), "retry-after-ms": f"{1e3 * wait_s:.0f}"}
    return Failure(status, message, code, headers=headers)


def _not_now(error: RateLimitError | OverloadedError | RegistryError | RoutingError) -> Failure:
    match error:
        case RateLimitError():
            return _rate_limited(error)
        case OverloadedError():
            return _later(429, str(error), error.reason, error.retry_after_s)
        case RegistryError():  # only the ledger of limits is asked while a request runs
            return _later(503, str(error), "limits_unavailable")
        case RoutingError():
            return _later(503, str(error), "no_worker")


def _rate_limited(error: RateLimitError) -> Failure:
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
    return Failure(429, str(error), "rate_limit_exceeded", headers=headers)


def _from_worker(error: CommutatorError, request_id: str) -> Failure:
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
    return Failure(_INTERNAL, text, "worker_failed")


RATE_LIMIT_HEADERS = tuple(
    istr(f"x-ratelimit-{what}-{of}")  # not folded anew for each answer
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
"""By which clients know how far they are from their limits, as OpenAI names them."""
_STANDINGS = 8192
"""Whose headers are remembered: requests within one allowance have one."""


@lru_cache(_STANDINGS)
def rate_limits(standing: Standing) -> Mapping[str, str]:
    """The headers of those limits that there are."""
    headers: dict[str, str] = {}
    if standing.limit_requests is not None:
        limit, remaining, reset = RATE_LIMIT_HEADERS[:3]
        headers[limit] = str(standing.limit_requests)
        headers[remaining] = str(standing.remaining_requests)
        headers[reset] = as_duration(standing.reset_requests_s or 0.0)
    if standing.limit_tokens is not None:
        limit, remaining, reset = RATE_LIMIT_HEADERS[3:]
        headers[limit] = str(standing.limit_tokens)
        headers[remaining] = str(standing.remaining_tokens)
        headers[reset] = as_duration(standing.reset_tokens_s or 0.0)
    return headers


def as_duration(seconds: float) -> str:
    """In whole seconds, rounded up, as OpenAI writes it: 0s, 59s, 6m0s, 1h0m7s."""
    minutes, whole = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{whole}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
