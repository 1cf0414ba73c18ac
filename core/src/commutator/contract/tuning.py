"""Tuning: other values of policies' options, tried on some requests while these are served.

A trial never changes the value that an option has; it only names another one for a part of the
requests. So ending the trial is all that a rollback takes, and a front door that loses the planner
rolls back by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.contract.launcher import Launcher
from commutator.contract.planner import PlannedWorker, PlannerTargets
from commutator.contract.request import RequestSummary

__all__ = ["ArmCounts", "Trial", "Tuning", "TuningContext", "counted", "trial_outcome"]

_MOST_DELAY = 4.0
"""A request that takes longer than this many times the target counts no more: one that hung would
outweigh all others."""


@frozen(kw_only=True)
class ArmCounts:
    """The requests that ended with one of the two values of a trial."""

    ended: int = 0
    """Without those whose client went away."""
    missed: int = 0
    """Of them, those that missed a target, or failed."""
    failed: int = 0
    """Of them, those that failed."""
    delay: float = 0.0
    """The sum of their delays: of each the mean of its time to the first token and its time between
    tokens, as parts of their targets, from 0 to 4; 4 where it failed."""
    delay_squared: float = 0.0
    """The sum of the squares of their delays."""

    def __add__(self, other: ArmCounts) -> ArmCounts:
        return self._with(other, 1)

    def __sub__(self, other: ArmCounts) -> ArmCounts:
        return self._with(other, -1)

    def _with(self, other: ArmCounts, times: int) -> ArmCounts:
        return ArmCounts(
            ended=self.ended + times * other.ended,
            missed=self.missed + times * other.missed,
            failed=self.failed + times * other.failed,
            delay=self.delay + times * other.delay,
            delay_squared=self.delay_squared + times * other.delay_squared,
        )

    @property
    def mean_delay(self) -> float:
        """0 without requests."""
        return self.delay / self.ended if self.ended else 0.0

    @property
    def delay_variance(self) -> float:
        """Of the mean."""
        if not self.ended:
            return 0.0
        return max(0.0, self.delay_squared / self.ended - self.mean_delay**2) / self.ended


def trial_outcome(targets: PlannerTargets, ttft_s: float | None, itl_s: float) -> ArmCounts:
    """How one request ended, as trials are judged by it; ``ttft_s`` is None where it failed."""
    if ttft_s is None:
        delay, missed = _MOST_DELAY, True
    else:
        parts = ttft_s / targets.ttft_s, itl_s / targets.itl_s
        delay = sum(min(part, _MOST_DELAY) for part in parts) / len(parts)
        missed = max(parts) > 1
    return ArmCounts(
        ended=1,
        missed=int(missed),
        failed=int(ttft_s is None),
        delay=delay,
        delay_squared=delay * delay,
    )


def counted(
    arms: tuple[ArmCounts, ArmCounts], takes: bool, one: ArmCounts
) -> tuple[ArmCounts, ArmCounts]:
    """``arms``, before and tried, with one more request, which has the tried value or not."""
    before, tried = arms
    return (before, tried + one) if takes else (before + one, tried)


@frozen(kw_only=True)
class Trial:
    """A value that a part of the requests gets, to be compared with the others."""

    number: int
    """Each stage of a trial has a number of its own; those of a planner grow."""
    option: str
    """Its path in the configuration."""
    before: float
    """The value that the other requests have."""
    value: float
    """The value that is tried."""
    share: float
    """The part of the requests that get it, from 0 to 1."""

    def takes(self, request: RequestSummary) -> bool:
        """Whether a request gets the value; equal at every front door, and for a conversation.

        Who gets it of a small share gets it of a larger one, too.
        """
        name = request.session_id or request.request_id
        text = f"{self.option}={self.value}:{name}".encode(errors="surrogatepass")
        drawn = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
        return drawn < self.share * 2**64


@frozen(kw_only=True)
class TuningContext:
    """What tuning gets for one run of a deployment."""

    config: Any
    """The configuration, a ``commutator.config.model.Config``."""
    launcher: Launcher
    """Starts processes beside those of the deployment."""
    folder: Path
    """For scratch files of the run; does not exist yet."""


class Tuning(ABC):
    """Decides which values options have. It takes a step with each plan, and must not block."""

    @abstractmethod
    def step(
        self,
        now_s: float,
        arms: Mapping[int, tuple[ArmCounts, ArmCounts]],
        workers: Sequence[PlannedWorker],
    ) -> Sequence[str]:
        """Take the next step; returns lines for people.

        ``arms``: requests that ended since the last step, by the number of the trial in which they
        began, with the value before and the tried one; number 0 where there was no trial.
        """

    @abstractmethod
    def forget(self) -> None:
        """Another planner acts: end what runs here. A trial ends by that."""

    @abstractmethod
    def status(self) -> Mapping[str, Any]:
        """What front doors apply, and people see, as plain data.

        "values": the value of each option that has not the configured one, by its path; "trial":
        the ``Trial`` as a mapping, or None; "arms": the ``ArmCounts`` of its two values as
        mappings, or None; "options": the value of each tunable option for requests in no trial;
        "steps": what was done, as numbers by kind; "mode", "searching" and "last" for people.
        """
