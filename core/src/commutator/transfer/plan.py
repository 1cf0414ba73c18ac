"""Plans in which transfers a list of blocks is moved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import field, frozen

from commutator.transfer.spans import Region, Span

__all__ = ["Batch", "BlockMove", "plan_batches"]


@frozen
class BlockMove:
    """One block to be moved between two places."""

    local: Span
    remote: Span = field()
    region: Region | None = None
    """What must be registered on the remote side for this block alone."""

    @remote.validator
    def _same_size(self, _: object, remote: Span) -> None:
        if remote.size_bytes != self.local.size_bytes:
            raise ValueError(f"sizes differ: {self.local} and {remote}")


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
    moves: Sequence[BlockMove], indices: Iterable[int], max_batch_bytes: int
) -> list[Batch]:
    """Batches that move these blocks in this order, each of at most so many bytes.

    A block is never split: one that is larger than the limit is a batch by itself. Neighbours that
    are contiguous on both sides become one span; blocks with a region of their own do not.
    """
    batches: list[Batch] = []
    chosen: list[int] = []
    size_bytes = 0
    for index in indices:
        block_bytes = moves[index].local.size_bytes
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
    open_ended = False  # whether the last span may grow
    for index in indices:
        move = moves[index]
        grows = open_ended and move.region is None
        if grows and _touch(local[-1], move.local) and _touch(remote[-1], move.remote):
            local[-1] = _joined(local[-1], move.local)
            remote[-1] = _joined(remote[-1], move.remote)
        else:
            local.append(move.local)
            remote.append(move.remote)
        open_ended = move.region is None
    regions = tuple(region for i in indices if (region := moves[i].region) is not None)
    return Batch(tuple(indices), tuple(local), tuple(remote), regions, size_bytes)


def _touch(first: Span, second: Span) -> bool:
    return first.device == second.device and first.address + first.size_bytes == second.address


def _joined(first: Span, second: Span) -> Span:
    return Span(first.address, first.size_bytes + second.size_bytes, first.device)
