"""Keeps what one tier moves below a limit, so that others get their share of disk or network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import define

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored

__all__ = ["Bandwidth", "BandwidthLimit"]


@define
class Bandwidth:
    """What is left of one tier's bytes per second. Pure: the time is passed in."""

    bytes_per_s: float
    _free_s: float = float("-inf")
    """When what was moved so far fits below the limit."""

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next bytes."""
        return max(0.0, self._free_s - now_s)

    def taken(self, size_bytes: int, now_s: float) -> None:
        """So many are moved next; ``now_s`` is when they were asked for."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self.bytes_per_s


class BandwidthLimit(BlockIo):
    """Waits before a job until the earlier ones fit below the limit, which several may share.

    A job that could not begin before its deadline fails without being tried.
    """

    def __init__(
        self,
        inner: BlockIo,
        bandwidth: Bandwidth,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._bandwidth = bandwidth
        self._clock = clock
        self._sleep = sleep

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
        pause_s = self._bandwidth.pause_s(now_s)
        if pause_s > context.remaining_s or context.over:
            return False
        if pause_s:
            self._sleep(pause_s)
        self._bandwidth.taken(size_bytes, now_s)
        return True
