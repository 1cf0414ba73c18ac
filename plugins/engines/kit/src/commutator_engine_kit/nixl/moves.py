"""Moves many blocks with few transfers, and returns a result for each block."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from attrs import frozen

from commutator.contract.tier import Region, Span
from commutator.errors import TransferCancelledError, TransferError, TransferTimeoutError
from commutator_engine_kit.nixl.agent import Transfer, TransferAgent, TransferPath, poll_pause_s

BATCH_BYTES = 8 << 20
MAX_IN_FLIGHT_BYTES = 32 << 20


@frozen(kw_only=True)
class MoveLimits:
    """How long moves may take, and how much of them is under way at a time."""

    timeout_s: float
    """For all blocks together."""
    batch_bytes: int = BATCH_BYTES
    """What one transfer takes, at most, or one block."""
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    """What is under way at a time, at most, or one block."""
    cancelled: Callable[[], bool] = lambda: False
    """Whether to give up."""
    stall_s: float = float("inf")
    """Give up where no block arrives for so long."""


def move_blocks(
    agent: TransferAgent,
    path: TransferPath,
    moves: Sequence[BlockMove],
    limits: MoveLimits,
    on_done: Callable[[Sequence[int]], None] = lambda _: None,
) -> list[TransferError | None]:
    """Move blocks in this order. Returns for each None or why it was not moved.

    Takes the arguments of ``BlockMoves``, and waits for the end.
    """
    moving = BlockMoves(agent, path, moves, limits, on_done)
    news_s = time.monotonic()
    try:
        while not moving.over:
            if moving.step():
                news_s = time.monotonic()
            else:
                time.sleep(poll_pause_s(time.monotonic() - news_s))
    finally:
        moving.abandon()
    return moving.results


@frozen
class Batch:
    """The blocks that one transfer moves."""

    indices: tuple[int, ...]
    """Positions of its blocks in the list."""
    local: tuple[Span, ...]
    remote: tuple[Span, ...]
    regions: tuple[Region, ...]
    size_bytes: int


class BlockMove(NamedTuple):
    """One block to be moved between two places of the same size."""

    local: Span
    remote: Span
    region: Region | None = None
    """A region that must be registered on the remote side for this block alone."""


class BlockMoves:
    """Moves blocks step by step, with each call of ``step``.

    ``on_done`` is called with the positions of blocks that have arrived, while later ones are under
    way, so that the caller can verify them.

    When a transfer of several blocks fails, each of them is tried once alone. Blocks that have not
    arrived in time get a TransferTimeoutError, and those that ``limits.cancelled`` stopped a
    TransferCancelledError. If the error has a token, the memory of its block stays pinned until
    ``TransferAgent.reap`` returns it.
    """

    def __init__(
        self,
        agent: TransferAgent,
        path: TransferPath,
        moves: Sequence[BlockMove],
        limits: MoveLimits,
        on_done: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self._agent = agent
        self._path = path
        self._moves = moves
        self._limits = limits
        self._on_done = on_done
        self._news_s = time.monotonic()
        """When a transfer last ended."""
        self._deadline_s = self._news_s + limits.timeout_s
        limit_bytes = min(limits.batch_bytes, limits.max_in_flight_bytes)
        self._queue = deque(plan_batches(moves, range(len(moves)), limit_bytes))
        self._under_way: list[tuple[Transfer, Batch]] = []
        self.results: list[TransferError | None] = [None] * len(moves)
        """For each block None, or why it was not moved; complete when ``over`` is true."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._queue or self._under_way)

    def step(self) -> bool:
        """Begin what there is room for and check what is under way. True if anything changed."""
        if (reason := self._given_up()) is not None:
            self._give_up(*reason)
            return True
        self._begin_more()
        arrived = self._arrived()
        if arrived:
            self._news_s = time.monotonic()
            self._begin_more()
            for batch in arrived:
                self._on_done(batch.indices)
        return bool(arrived) or not self._under_way

    def abandon(self) -> None:
        """Give up transfers under way; ``TransferAgent.reap`` returns their tokens at their end."""
        for transfer, _ in self._under_way:
            transfer.abandoned = True

    def _begin_more(self) -> None:
        while self._queue and self._has_room(self._queue[0]) and self._given_up() is None:
            batch = self._queue.popleft()
            try:
                transfer = self._agent.start(self._path, batch.local, batch.remote, batch.regions)
                if transfer.done():  # some backends copy before they return
                    self._news_s = time.monotonic()
                    self._on_done(batch.indices)
                else:
                    self._under_way.append((transfer, batch))
            except TransferError as error:
                self._failed(batch, error)

    def _has_room(self, batch: Batch) -> bool:
        under_way_bytes = sum(batch.size_bytes for _, batch in self._under_way)
        return not under_way_bytes or (
            under_way_bytes + batch.size_bytes <= self._limits.max_in_flight_bytes
        )

    def _arrived(self) -> list[Batch]:
        arrived, remaining = [], []
        for transfer, batch in self._under_way:
            try:
                if transfer.done():
                    arrived.append(batch)
                else:
                    remaining.append((transfer, batch))
            except TransferError as error:
                self._failed(batch, error)
        self._under_way = remaining
        return arrived

    def _failed(self, batch: Batch, error: TransferError) -> None:
        if len(batch.indices) == 1:
            self.results[batch.indices[0]] = error
        else:
            self._queue.extendleft(reversed(plan_batches(self._moves, batch.indices, 0)))

    def _given_up(self) -> tuple[type[TransferTimeoutError], str] | None:
        if self._limits.cancelled():
            return TransferCancelledError, "cancelled"
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            return TransferTimeoutError, f"not there after {self._limits.timeout_s} s"
        if now_s - self._news_s >= self._limits.stall_s:
            return TransferTimeoutError, f"nothing arrived for {self._limits.stall_s} s"
        return None

    def _give_up(self, kind: type[TransferTimeoutError], why: str) -> None:
        self.abandon()
        for transfer, batch in self._under_way:
            for index in batch.indices:
                self.results[index] = kind(f"block {index}: {why}", transfer.token)
        for batch in self._queue:
            for index in batch.indices:
                self.results[index] = kind(f"block {index}: {why}, and never begun")
        self._under_way.clear()
        self._queue.clear()


def when_whole(
    owners: Sequence[int], on_done: Callable[[Sequence[int]], None]
) -> Callable[[Sequence[int]], None]:
    """An ``on_done`` of moves for one of blocks: called with those whose every move is done.

    ``owners`` has the number of each move's block.
    """
    left = Counter(owners)

    def moved(indices: Sequence[int]) -> None:
        whole = []
        for index in indices:
            owner = owners[index]
            left[owner] -= 1
            if not left[owner]:
                whole.append(owner)
        if whole:
            on_done(whole)

    return moved


def plan_batches(
    moves: Sequence[BlockMove],
    indices: Iterable[int],
    max_batch_bytes: int,
) -> list[Batch]:
    """Batches that move these blocks in this order, each of at most ``max_batch_bytes``.

    A block is never split: one that is larger than the limit is a batch alone. So is one with its
    own region: a transfer of several objects fails with the first of them, and NIXL then goes on
    reading or writing the others' memory with no way to learn when it ends. Neighbours that are
    contiguous on both sides become one span. Raises ValueError when a block's two places differ in
    size.
    """
    batches: list[Batch] = []
    chosen: list[int] = []
    size_bytes = 0
    for index in indices:
        local, remote, region = moves[index]
        block_bytes = local.size_bytes
        if remote.size_bytes != block_bytes:
            raise ValueError(f"sizes differ: {local} and {remote}")
        is_alone = region is not None or (chosen and moves[chosen[-1]].region is not None)
        if chosen and (is_alone or size_bytes + block_bytes > max_batch_bytes):
            batches.append(_batch(moves, chosen, size_bytes))
            chosen, size_bytes = [], 0
        chosen.append(index)
        size_bytes += block_bytes
    if chosen:
        batches.append(_batch(moves, chosen, size_bytes))
    return batches


def _batch(moves: Sequence[BlockMove], indices: Sequence[int], size_bytes: int) -> Batch:
    firsts: list[BlockMove] = []
    lasts: list[BlockMove] = []
    for index in indices:
        move = moves[index]
        if lasts and _continues(lasts[-1], move):
            lasts[-1] = move
        else:
            firsts.append(move)
            lasts.append(move)
    return Batch(
        tuple(indices),
        tuple([_joined(one.local, two.local) for one, two in zip(firsts, lasts, strict=True)]),
        tuple([_joined(one.remote, two.remote) for one, two in zip(firsts, lasts, strict=True)]),
        tuple([one.region for one in firsts if one.region is not None]),
        size_bytes,
    )


def _continues(one: BlockMove, other: BlockMove) -> bool:
    return (
        one.local.address + one.local.size_bytes == other.local.address
        and one.remote.address + one.remote.size_bytes == other.remote.address
        and one.local.device == other.local.device
        and one.remote.device == other.remote.device
    )


def _joined(first: Span, last: Span) -> Span:
    if first is last:
        return first
    return Span(first.address, last.address + last.size_bytes - first.address, first.device)


_LANES = 2
"""Threads that move blocks in memory for one tier or arena, because a CPU copies what is read.
`python -m bench handover` compares with bare NIXL."""

_WORTH_BYTES = 2 << 20
"""A lane with fewer bytes than this is not worth waking a thread for."""


def lane_names(agent_name: str) -> list[str]:
    """The name of each lane's agent, ``agent_name`` first; at most one for each CPU."""
    names = [agent_name, *(f"{agent_name}-{lane}" for lane in range(1, _LANES))]
    return names[: len(os.sched_getaffinity(0))]


def lanes_worth(count: int, size_bytes: int, most: int) -> int:
    """Number of lanes that move ``count`` blocks of ``size_bytes`` in all: one to ``most``."""
    return max(1, min(most, count, size_bytes // _WORTH_BYTES))


def shares(count: int, parts: int) -> list[range]:
    """Split ``count`` blocks into up to ``parts`` contiguous, equal shares; the last may be less.

    Returns at least one share, which may be empty.
    """
    each = max(1, -(-count // parts))
    return [range(first, min(first + each, count)) for first in range(0, max(count, 1), each)]
