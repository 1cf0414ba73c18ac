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
    moves: Sequence[BlockMove],
    indices: Iterable[int],
    max_batch_bytes: int,
    last_batch_bytes: int | None = None,
) -> list[Batch]:
    """Batches that move these blocks in this order, each of at most so many bytes.

    With ``last_batch_bytes`` they shrink towards the end, to about so many bytes, as each leaves at
    least a third of what is left: what is done with one batch when it has arrived has time while
    the next one moves, and after the last there is little to do.

    A block is never split: one that is larger than the limit is a batch by itself. Neighbours that
    are contiguous on both sides become one span; blocks with a region of their own do not.
    """
    wanted = list(indices)
    left_bytes = sum(moves[index].local.size_bytes for index in wanted)
    batches: list[Batch] = []
    chosen: list[int] = []
    size_bytes = 0
    limit_bytes = _limit(left_bytes, max_batch_bytes, last_batch_bytes)
    for index in wanted:
        block_bytes = moves[index].local.size_bytes
        if chosen and size_bytes + block_bytes > limit_bytes:
            batches.append(_batch(moves, chosen, size_bytes))
            left_bytes -= size_bytes
            limit_bytes = _limit(left_bytes, max_batch_bytes, last_batch_bytes)
            chosen, size_bytes = [], 0
        chosen.append(index)
        size_bytes += block_bytes
    if chosen:
        batches.append(_batch(moves, chosen, size_bytes))
    return batches


def _limit(left_bytes: int, max_batch_bytes: int, last_batch_bytes: int | None) -> int:
    if last_batch_bytes is None:
        return max_batch_bytes
    return min(max_batch_bytes, max(last_batch_bytes, left_bytes * 2 // 3))


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
