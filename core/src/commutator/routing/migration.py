"""What becomes of a request whose worker failed it: another worker, its end, or its failure. Pure.

One migration by default: a request that kills every worker it meets must not meet them all.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from commutator.errors import (
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
)
from commutator.types import FinishReason, SamplingParams

__all__ = ["Action", "Cause", "Fail", "Finish", "Migrate", "Progress", "cause_of", "decide"]

_LEASE_EXPIRED = "lease expired"
"""The registry's word; see the hook ``worker_down``."""


class Cause(StrEnum):
    """Why a worker does not finish a request that another one could."""

    CONNECTION_LOST = "connection_lost"
    INCOMPLETE_STREAM = "incomplete_stream"
    LEASE_EXPIRED = "lease_expired"
    OVERLOADED = "overloaded"
    """It is healthy and refused the request, which is not a failure of the worker."""


@frozen
class Progress:
    """How far a request has come, and what it may still do."""

    sampling: SamplingParams
    """As the client gave it: lengths count from the beginning of the answer."""
    generated_tokens: int
    last_token: int | None
    """The newest token of the answer."""
    migrations: int
    """Workers that failed it before this one; those that were only full do not count."""
    limit: int
    time_left_s: float


@frozen
class Migrate:
    """Send prompt and answer so far to another worker."""

    cause: Cause


@frozen
class Finish:
    """Nothing is missing but the worker's word that this is the end."""

    reason: FinishReason
    stop_reason: int | None = None


@frozen
class Fail:
    """Let the client have the error."""


Action = Migrate | Finish | Fail


def cause_of(error: Exception, gone: str | None) -> Cause | None:
    """The reason to migrate, if ``error`` is one.

    ``gone`` is the registry's reason when it has taken the worker away. None for what another
    worker would answer the same: a refused request, or an engine that failed computing it.
    """
    match error:
        case EngineOverloadedError():
            return Cause.OVERLOADED
        case EngineUnavailableError():
            return Cause.LEASE_EXPIRED if gone == _LEASE_EXPIRED else Cause.CONNECTION_LOST
        case EngineIncompleteError():
            return Cause.INCOMPLETE_STREAM
    return None


def decide(cause: Cause | None, progress: Progress) -> Action:
    """What to do about a worker that does not finish a request."""
    if cause is None or progress.time_left_s <= 0:
        return Fail()
    if cause is Cause.OVERLOADED:
        return Migrate(cause)  # as often as there are workers: none is asked twice
    if (end := _natural_end(progress)) is not None:
        return end
    return Migrate(cause) if progress.migrations < progress.limit else Fail()


def _natural_end(progress: Progress) -> Finish | None:
    """The end that the answer has reached by its tokens alone; stop strings are the reader's."""
    sampling, generated = progress.sampling, progress.generated_tokens
    stops = generated >= max(1, sampling.min_tokens)
    if stops and progress.last_token in sampling.stop_token_ids:
        return Finish(FinishReason.STOP, progress.last_token)
    return Finish(FinishReason.LENGTH) if generated >= sampling.max_tokens else None
