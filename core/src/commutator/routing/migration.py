"""Decides what follows a worker's failure: another worker, the end of the request, or its failure.

Does no I/O. The default is one migration, so that a request that crashes its workers does not crash
all of them.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from commutator.contract.request import FinishReason, SamplingParams
from commutator.errors import EngineIncompleteError, EngineOverloadedError, EngineUnavailableError

__all__ = [
    "Action",
    "Cause",
    "Fail",
    "Finish",
    "Migrate",
    "Progress",
    "cause_of",
    "decide",
]

_LEASE_EXPIRED = "lease expired"
"""The registry's reason; see the hook ``worker_down``."""


class Cause(StrEnum):
    """Why a worker did not finish a request that another one may finish."""

    CONNECTION_LOST = "connection_lost"
    INCOMPLETE_STREAM = "incomplete_stream"
    LEASE_EXPIRED = "lease_expired"
    DRAINED = "drained"
    """The worker was stopped while it drained, with requests that took too long. Nothing failed."""
    OVERLOADED = "overloaded"
    """The worker is healthy and refused the request; that is not a failure of the worker."""


@frozen
class Progress:
    """How much of a request is done, and its limits for migrations."""

    sampling: SamplingParams
    """As the client sent it: lengths count from the beginning of the answer."""
    generated_tokens: int
    last_token: int | None
    """The newest token of the answer."""
    migrations: int
    """Migrations so far; those away from a full or a drained worker do not count."""
    limit: int
    time_left_s: float


@frozen
class Migrate:
    """Send the prompt and the answer so far to another worker."""

    cause: Cause


@frozen
class Finish:
    """The answer is complete; only the worker's finish reason is missing."""

    reason: FinishReason
    stop_reason: int | None = None


@frozen
class Fail:
    """Report the error to the client."""


Action = Migrate | Finish | Fail


def cause_of(error: Exception, gone: str | None, *, draining: bool = False) -> Cause | None:
    """The reason to migrate, if ``error`` is one.

    ``gone``: the registry's reason for removing the worker; None while it is registered.
    ``draining``: whether it got no new requests any more. Returns None where another worker would
    fail in the same way: the request was refused, or the engine failed while computing it.
    """
    match error:
        case EngineOverloadedError():
            return Cause.OVERLOADED
        case EngineUnavailableError() | EngineIncompleteError() if draining:
            return Cause.DRAINED
        case EngineUnavailableError():
            return Cause.LEASE_EXPIRED if gone == _LEASE_EXPIRED else Cause.CONNECTION_LOST
        case EngineIncompleteError():
            return Cause.INCOMPLETE_STREAM
    return None


def decide(cause: Cause | None, progress: Progress) -> Action:
    """What to do when a worker does not finish a request."""
    if cause is None or progress.time_left_s <= 0:
        return Fail()
    if cause is Cause.OVERLOADED:
        return Migrate(cause)  # no limit but the number of workers: none is tried twice
    if (end := _natural_end(progress)) is not None:
        return end
    if cause is Cause.DRAINED:
        return Migrate(cause)  # as often as workers are stopped, which is no fault of the request
    return Migrate(cause) if progress.migrations < progress.limit else Fail()


def _natural_end(progress: Progress) -> Finish | None:
    """The end that the answer's tokens have reached. The front door checks stop strings itself."""
    sampling, generated = progress.sampling, progress.generated_tokens
    stops = generated >= max(1, sampling.min_tokens)
    if stops and progress.last_token in sampling.stop_token_ids:
        return Finish(FinishReason.STOP, progress.last_token)
    return Finish(FinishReason.LENGTH) if generated >= sampling.max_tokens else None
