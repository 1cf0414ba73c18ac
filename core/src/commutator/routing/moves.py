"""What is set and told of a request's changes of worker."""

from __future__ import annotations

import math
from typing import Protocol

from attrs import frozen

__all__ = ["DispatchLimits", "MigrationObserver", "Moved"]


class MigrationObserver(Protocol):
    """What hears of migrations, for metrics."""

    def migrated(self, model: str, reason: str) -> None:
        """A request goes on at another worker."""

    def recomputed(self, model: str, tokens: int) -> None:
        """So many tokens, whose KV was lost with the worker, have been computed again."""


@frozen
class DispatchLimits:
    """How often and how long another worker may be tried."""

    migrations: int = 0
    wait_s: float = 0.0
    """How long a request that lost its worker waits for one that can go on with it."""
    deadline_s: float | None = None
    """By the event loop's clock; nothing is tried after it."""

    def time_left_s(self, now_s: float) -> float:
        return math.inf if self.deadline_s is None else self.deadline_s - now_s


@frozen
class Moved:
    """One change of worker."""

    from_worker: str
    to_worker: str
    reason: str
    generated_tokens: int
    """The answer's length at that time."""
