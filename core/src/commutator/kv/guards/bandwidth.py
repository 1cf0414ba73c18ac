"""Keeps what one tier moves below a limit, so that others get their share of disk or network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored

__all__ = ["BandwidthLimit"]


class BandwidthLimit(BlockIo):
    """Waits before a job until the earlier ones fit below ``bytes_per_s``.

    A job that could not begin before its deadline fails without being tried.
    """

    def __init__(
        self,
        inner: BlockIo,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        if not self._wait(sum(block.local.size_bytes for block in blocks), context):
            return [Unstored("the tier's bandwidth limit left no time for it") for _ in blocks]
        return self._inner.store(blocks, context)

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        if not self._wait(sum(block.stored.size_bytes for block in blocks), context):
            return [LoadResult.FAILED for _ in blocks]
        return self._inner.load(blocks, context)

    def _wait(self, size_bytes: int, context: IoContext) -> bool:
        now_s = self._clock()
        pause_s = max(0.0, self._free_s - now_s)
        if pause_s > context.remaining_s or context.over:
            return False
        if pause_s:
            self._sleep(pause_s)
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
        return True
