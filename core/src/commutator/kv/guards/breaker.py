"""Leaves a tier alone while it fails, and tries it again from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from attrs import define

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored

__all__ = ["Breaker", "BreakerIo", "BreakerState"]


class BreakerState(Enum):
    """Closed lets everything through, open nothing, half-open one job to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@define
class Breaker:
    """Opens after ``max_failures`` failed jobs in a row. Pure: the time is passed in.

    It stays open for ``pause_s``, and twice as long after each failed trial, up to ``max_pause_s``.
    """

    max_failures: int = 3
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    _failures: int = 0
    _opened_s: float | None = None
    _now_pause_s: float = 0.0
    _trying: bool = False

    def state(self, now_s: float) -> BreakerState:
        if self._opened_s is None:
            return BreakerState.CLOSED
        if self._trying or now_s >= self._opened_s + self._now_pause_s:
            return BreakerState.HALF_OPEN
        return BreakerState.OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a job may go ahead; if it does, report how it went."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            if self._trying:
                return False
            self._trying = True
        return state is not BreakerState.OPEN

    def succeeded(self) -> None:
        self._failures, self._opened_s, self._now_pause_s, self._trying = 0, None, 0.0, False

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self._trying or self._failures >= self.max_failures:
            longer_s = self._now_pause_s * 2 if self._now_pause_s else self.pause_s
            self._now_pause_s = min(longer_s, self.max_pause_s)
            self._opened_s, self._trying = now_s, False

    def given_up(self) -> None:
        """The job neither succeeded nor failed: nobody wanted it any more."""
        self._trying = False


class BreakerIo(BlockIo):
    """A job counts as failed when not one of its blocks got through."""

    def __init__(
        self,
        inner: BlockIo,
        breaker: Breaker,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._breaker = breaker
        self._clock = clock

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        if not self._breaker.allows(self._clock()):
            return [Unstored("the tier is left alone after failures") for _ in blocks]
        with self._failing_on_exceptions():
            results = self._inner.store(blocks, context)
        failures = [isinstance(result, Unstored) for result in results]
        self._judge(failures, context)
        return results

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        if not self._breaker.allows(self._clock()):
            return [LoadResult.FAILED for _ in blocks]
        with self._failing_on_exceptions():
            results = self._inner.load(blocks, context)
        self._judge([result is LoadResult.FAILED for result in results], context)
        return results

    @contextmanager
    def _failing_on_exceptions(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._breaker.failed(self._clock())
            raise

    def _judge(self, failures: Sequence[bool], context: IoContext) -> None:
        if not all(failures):
            self._breaker.succeeded()
        elif context.cancelled() or not failures:
            self._breaker.given_up()
        else:
            self._breaker.failed(self._clock())
