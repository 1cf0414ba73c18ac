"""Blocks go straight between the engine's memory and the tier, which keeps their checksums."""

from __future__ import annotations

from collections.abc import Sequence

from commutator.kv.arena import bytes_at
from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.checksum import checksum
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored
from commutator.kv.tier_mover import TierMover
from commutator.transfer import Direction

__all__ = ["DirectIo"]


class DirectIo(BlockIo):
    """For local memory that the CPU can read, and a tier whose blocks are stored as they are.

    Blocks are summed while others are moved, and soon after they were, the last one first: part of
    what a CPU has copied is still in its caches.
    """

    def __init__(self, mover: TierMover) -> None:
        self._mover = mover

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        results: list[Stored | Unstored] = [Unstored("")] * len(blocks)

        def add_up(moved: Sequence[int]) -> None:
            for index in reversed(moved):
                block = blocks[index]
                total = checksum(bytes_at(block.local))
                results[index] = block.stored(block.local.size_bytes, total)

        errors = self._mover.move(
            Direction.WRITE,
            [(block.local, block.slot, block.local.size_bytes) for block in blocks],
            context,
            on_moved=add_up,
        )
        for index, error in enumerate(errors):
            if error is not None:
                results[index] = Unstored(str(error))
        return results

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        results = [LoadResult.FAILED] * len(blocks)
        wanted: list[int] = []
        for index, block in enumerate(blocks):
            if block.stored.size_bytes == block.local.size_bytes:
                wanted.append(index)
            else:
                results[index] = LoadResult.CORRUPT

        def verify(moved: Sequence[int]) -> None:
            for position in reversed(moved):
                block = blocks[wanted[position]]
                intact = checksum(bytes_at(block.local)) == block.stored.checksum
                results[wanted[position]] = LoadResult.LOADED if intact else LoadResult.CORRUPT

        self._mover.move(
            Direction.READ,
            [
                (blocks[index].local, blocks[index].stored.slot, blocks[index].local.size_bytes)
                for index in wanted
            ],
            context,
            on_moved=verify,
        )
        return results
