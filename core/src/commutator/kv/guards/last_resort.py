"""Whatever a tier's I/O raises is a failure of its blocks: nobody above it has to expect that."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored

__all__ = ["LastResort"]

log = logging.getLogger(__name__)


class LastResort(BlockIo):
    """An answer for each block, always. What was raised is logged, once for a job."""

    def __init__(self, inner: BlockIo, tier: str) -> None:
        self._inner = inner
        self._tier = tier

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        try:
            results = self._inner.store(blocks, context)
            _check(len(results), len(blocks))
        except Exception as error:
            log.exception("tier %s: %d blocks are not stored", self._tier, len(blocks))
            return [Unstored(str(error)) for _ in blocks]
        return results

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        try:
            results = self._inner.load(blocks, context)
            _check(len(results), len(blocks))
        except Exception:
            log.exception("tier %s: %d blocks are not loaded", self._tier, len(blocks))
            return [LoadResult.FAILED for _ in blocks]
        return results


def _check(results: int, blocks: int) -> None:
    if results != blocks:
        raise ValueError(f"{results} results for {blocks} blocks")
