"""Tries failed blocks again, as long as the budget lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored

__all__ = ["RetryBudget", "RetryIo"]

BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


@define
class RetryBudget:
    """Retries are a share of the blocks that went well lately, so that they cannot become a storm.

    Each success earns ``ratio`` of a retry; at most ``most`` are saved up. Pure.
    """

    ratio: float = 0.1
    most: float = 64.0
    saved: float = 16.0

    def earned(self, successes: int) -> None:
        self.saved = min(self.most, self.saved + self.ratio * successes)

    def take(self, wanted: int) -> int:
        """How many of ``wanted`` blocks may be tried again."""
        granted = min(wanted, int(self.saved))
        self.saved -= granted
        return granted


class RetryIo(BlockIo):
    """Only failures are tried again: a block that is missing or corrupt stays so."""

    def __init__(
        self,
        inner: BlockIo,
        *,
        max_attempts: int,
        backoff_s: float,
        budget: RetryBudget | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._budget = budget or RetryBudget()
        self._sleep = sleep

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        return self._with_retries(
            self._inner.store,
            blocks,
            context,
            lambda result: isinstance(result, Unstored),
        )

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        return self._with_retries(
            self._inner.load, blocks, context, lambda result: result is LoadResult.FAILED
        )

    def _with_retries(
        self,
        attempt: Callable[[Sequence[BlockT], IoContext], list[ResultT]],
        blocks: Sequence[BlockT],
        context: IoContext,
        failed: Callable[[ResultT], bool],
    ) -> list[ResultT]:
        results = attempt(blocks, context)
        for number in range(1, self._max_attempts):
            again = [index for index, result in enumerate(results) if failed(result)]
            self._budget.earned(len(results) - len(again))
            again = again[: self._budget.take(len(again))]
            pause_s = self._backoff_s * 2 ** (number - 1)
            if not again or context.over or context.remaining_s < pause_s:
                break
            self._sleep(pause_s)
            retried = attempt([blocks[index] for index in again], context)
            for index, result in zip(again, retried, strict=True):
                results[index] = result
        return results
