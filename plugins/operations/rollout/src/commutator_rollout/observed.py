"""What a front door counts for the judge: the requests of versions that are compared."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Mapping
from typing import Any

from attrs import define, field

from commutator.contract.observer import Observer
from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.errors import CommutatorError, DeadlineError
from commutator_rollout.judge import Arm
from commutator_traffic.table import reason_of

_MOST_TIMES = 200
"""Times of a model that are sent in one frame; of more, some drawn by chance."""
_OF_THE_VERSION = {"no_worker", "overload", "error"}


@define
class _Request:
    began_s: float
    ttft_s: float | None = None


@define
class _Counts:
    ended: int = 0
    failed: int = 0
    ttft_s: list[float] = field(factory=list)
    itl_s: list[float] = field(factory=list)

    def packed(self) -> list[Any]:
        return [self.ended, self.failed, _some(self.ttft_s), _some(self.itl_s)]


class Counter(Observer):
    """Counts requests of some models."""

    def __init__(self, models: Collection[str]) -> None:
        self._models = models
        self._running: dict[str, _Request] = {}
        self._counts: dict[str, _Counts] = {}

    def take(self) -> dict[str, list[Any]]:
        """By model, what ended since the last call, as ``arm`` reads it; empty if nothing did."""
        taken = {model: one.packed() for model, one in self._counts.items()}
        self._counts = {}
        return taken

    def request_received(self, request: RequestSummary) -> None:
        if request.model in self._models:
            self._running[request.request_id] = _Request(time.perf_counter())

    def request_first_token(self, request: RequestSummary, worker_id: str, ttft_s: float) -> None:
        if (one := self._running.get(request.request_id)) is not None:
            one.ttft_s = ttft_s

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        if (one := self._running.pop(request.request_id, None)) is None:
            return
        counts = self._of(request.model)
        counts.ended += 1
        if one.ttft_s is None:
            return
        counts.ttft_s.append(one.ttft_s)
        if outcome.generated_tokens > 1:
            later_s = max(0.0, outcome.duration_s - one.ttft_s)
            counts.itl_s.append(later_s / (outcome.generated_tokens - 1))

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        if (one := self._running.pop(request.request_id, None)) is None:
            return
        if isinstance(error, asyncio.CancelledError):
            if one.ttft_s is None:  # who waits long gives up: without it only quick ones count
                waited_s = time.perf_counter() - one.began_s
                self._of(request.model).ttft_s.append(waited_s)
        elif _is_of_the_version(error):
            counts = self._of(request.model)
            counts.ended += 1
            counts.failed += 1

    def _of(self, model: str) -> _Counts:
        return self._counts.setdefault(model, _Counts())


def _is_of_the_version(error: BaseException) -> bool:
    """Whether it says something of the model, not of the request or its sender."""
    if isinstance(error, DeadlineError):
        return True
    return not isinstance(error, CommutatorError) or reason_of(error) in _OF_THE_VERSION


def _some(values: list[float]) -> list[float]:
    return values if len(values) <= _MOST_TIMES else random.sample(values, _MOST_TIMES)


def arm(packed: Any) -> Arm:
    """What ``Counter.take`` has packed. Raises ValueError."""
    match packed:
        case [int(ended), int(failed), list(ttft_s), list(itl_s)]:
            return Arm(
                ended=ended,
                failed=failed,
                ttft_s=tuple(map(float, ttft_s)),
                itl_s=tuple(map(float, itl_s)),
            )
    raise ValueError("counts of a model: expected [ended, failed, [s, ...], [s, ...]]")


def joined(arms: Mapping[str, Arm], models: Collection[str]) -> Arm:
    """The requests of all ``models``."""
    return sum((arms[model] for model in models if model in arms), Arm())
