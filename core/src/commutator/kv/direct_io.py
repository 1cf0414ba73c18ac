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

    A block is checked while the ones after it are moved.
    """

    def __init__(self, mover: TierMover) -> None:
        self._mover = mover

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        sums: dict[int, int] = {}

        def add_up(moved: Sequence[int]) -> None:
            for index in moved:
                sums[index] = checksum(bytes_at(blocks[index].local))

        errors = self._mover.move(
            Direction.WRITE,
            [(block.local, block.slot, block.local.size_bytes) for block in blocks],
            context,
            on_moved=add_up,
        )
        return [
            _stored(block, sums[index]) if error is None else Unstored(str(error))
            for index, (block, error) in enumerate(zip(blocks, errors, strict=True))
        ]

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        results = [LoadResult.FAILED] * len(blocks)
        sizes_fit = [block.stored.size_bytes == block.local.size_bytes for block in blocks]

        def verify(moved: Sequence[int]) -> None:
            for index in moved:
                block = blocks[wanted[index]]
                intact = checksum(bytes_at(block.local)) == block.stored.checksum
                results[wanted[index]] = LoadResult.LOADED if intact else LoadResult.CORRUPT

        wanted = [index for index, fits in enumerate(sizes_fit) if fits]
        for index, fits in enumerate(sizes_fit):
            if not fits:
                results[index] = LoadResult.CORRUPT
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


def _stored(block: StoreBlock, total: int) -> Stored | Unstored:
    if block.checksum is not None and block.checksum != total:
        return Unstored("its bytes are not what was stored before", corrupt_source=True)
    return Stored(
        key=block.key,
        slot=block.slot,
        size_bytes=block.local.size_bytes,
        checksum=total,
        parent=block.parent,
        token_ids=block.token_ids,
    )
