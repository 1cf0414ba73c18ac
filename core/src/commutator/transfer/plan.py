"""Plans in which transfers a list of blocks is moved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attrs import frozen

from commutator.transfer.spans import Region, Span

__all__ = ["Batch", "BlockMove", "plan_batches"]


class BlockMove(NamedTuple):
    """One block to be moved between two places of the same size."""

    local: Span
    remote: Span
    region: Region | None = None
    """What must be registered on the remote side for this block alone."""


@frozen
class Batch:
    """What one transfer moves."""

    indices: tuple[int, ...]
    """Which blocks of the list."""
    local: tuple[Span, ...]
    remote: tuple[Span, ...]
    regions: tuple[Region, ...]
    size_bytes: int


def plan_batches(
    moves: Sequence[BlockMove],
    indices: Iterable[int],
    max_batch_bytes: int,
) -> list[Batch]:
    """Batches that move these blocks in this order, each of at most so many bytes.

    A block is never split: one that is larger than the limit is a batch by itself. Neighbours that
    are contiguous on both sides become one span; blocks with a region of their own do not. Raises
    ValueError when a block's two places differ in size.
    """
    batches: list[Batch] = []
    chosen: list[int] = []
    size_bytes = 0
    for index in indices:
        local, remote, _ = moves[index]
        block_bytes = local.size_bytes
        if remote.size_bytes != block_bytes:
            raise ValueError(f"sizes differ: {local} and {remote}")
        if chosen and size_bytes + block_bytes > max_batch_bytes:
            batches.append(_batch(moves, chosen, size_bytes))
            chosen, size_bytes = [], 0
        chosen.append(index)
        size_bytes += block_bytes
    if chosen:
        batches.append(_batch(moves, chosen, size_bytes))
    return batches


def _batch(moves: Sequence[BlockMove], indices: Sequence[int], size_bytes: int) -> Batch:
    local: list[Span] = []
    remote: list[Span] = []
    regions: list[Region] = []
    run: list[BlockMove] = []  # each touches the one before it, on both sides
    for index in indices:
        move = moves[index]
        if run and not _continues(run[-1], move):
            local.append(_joined(run[0].local, run[-1].local))
            remote.append(_joined(run[0].remote, run[-1].remote))
            run = []
        run.append(move)
        if move.region is not None:
            regions.append(move.region)
    if run:
        local.append(_joined(run[0].local, run[-1].local))
        remote.append(_joined(run[0].remote, run[-1].remote))
    return Batch(tuple(indices), tuple(local), tuple(remote), tuple(regions), size_bytes)


def _continues(one: BlockMove, other: BlockMove) -> bool:
    return (
        one.region is None
        and other.region is None
        and one.local.address + one.local.size_bytes == other.local.address
        and one.remote.address + one.remote.size_bytes == other.remote.address
        and one.local.device == other.local.device
        and one.remote.device == other.remote.device
    )


def _joined(first: Span, last: Span) -> Span:
    if first is last:
        return first
    return Span(first.address, last.address + last.size_bytes - first.address, first.device)
