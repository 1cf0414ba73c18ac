"""Blocks go straight between the engine's memory and the tier, which keeps their checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.checksum_thread import checksums_of
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import Stored
from commutator.kv.tier_mover import TierMover
from commutator.transfer import Direction

__all__ = ["DirectIo"]


class DirectIo(BlockIo):
    """For local memory that the CPU can read, and a tier whose blocks are stored as they are.

    Blocks are checked while others are moved.
    """

    def __init__(self, mover: TierMover) -> None:
        self._mover = mover

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        sums = checksums_of([block.local for block in blocks])
        errors = self._mover.move(
            Direction.WRITE,
            [(block.local, block.slot, block.local.size_bytes) for block in blocks],
            context,
        )
        return [
            block.stored(block.local.size_bytes, total) if error is None else Unstored(str(error))
            for block, total, error in zip(blocks, sums(), errors, strict=True)
        ]

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        results = [LoadResult.FAILED] * len(blocks)
        wanted: list[int] = []
        for index, block in enumerate(blocks):
            if block.stored.size_bytes == block.local.size_bytes:
                wanted.append(index)
            else:
                results[index] = LoadResult.CORRUPT
        checks: list[tuple[list[int], Callable[[], list[int]]]] = []

        def verify(moved: Sequence[int]) -> None:
            arrived = [wanted[position] for position in moved]
            checks.append((arrived, checksums_of([blocks[index].local for index in arrived])))

        self._mover.move(
            Direction.READ,
            [
                (blocks[index].local, blocks[index].stored.slot, blocks[index].local.size_bytes)
                for index in wanted
            ],
            context,
            on_moved=verify,
        )
        for arrived, sums in checks:
            for index, total in zip(arrived, sums(), strict=True):
                intact = total == blocks[index].stored.checksum
                results[index] = LoadResult.LOADED if intact else LoadResult.CORRUPT
        return results
