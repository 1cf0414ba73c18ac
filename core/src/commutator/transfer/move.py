"""Moves many blocks by few transfers, and tells of each block what became of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from commutator.errors import TransferCancelledError, TransferError, TransferTimeoutError
from commutator.transfer.agent import TransferAgent
from commutator.transfer.plan import Batch, BlockMove, plan_batches
from commutator.transfer.spans import Direction, Memory
from commutator.transfer.transfer import Transfer, poll_pause_s

__all__ = ["BATCH_BYTES", "MAX_IN_FLIGHT_BYTES", "BlockMoves", "move_blocks"]

BATCH_BYTES = 8 << 20
MAX_IN_FLIGHT_BYTES = 32 << 20


def move_blocks(
    agent: TransferAgent,
    direction: Direction,
    moves: Sequence[BlockMove],
    *,
    local_memory: Memory,
    remote_memory: Memory,
    backend: str,
    timeout_s: float,
    peer: str | None = None,
    batch_bytes: int = BATCH_BYTES,
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    on_done: Callable[[Sequence[int]], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[TransferError | None]:
    """Move blocks, in this order, and return for each None or why it was not moved.

    Takes what ``BlockMoves`` takes, and waits for the end.
    """
    moving = BlockMoves(
        agent, direction, moves, local_memory=local_memory, remote_memory=remote_memory,
        backend=backend, timeout_s=timeout_s, peer=peer, batch_bytes=batch_bytes,
        max_in_flight_bytes=max_in_flight_bytes, on_done=on_done, cancelled=cancelled,
    )  # fmt: skip
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


class BlockMoves:
    """Blocks that are being moved; whoever calls ``step`` again and again can do more meanwhile.

    A transfer takes up to ``batch_bytes``, and up to ``max_in_flight_bytes`` are under way at
    a time (one block at least). ``on_done`` is called with the positions of blocks that have
    arrived, while later ones are under way: the place to verify them.

    When a transfer of several blocks fails, each of them is tried once by itself. Blocks that are
    not there after ``timeout_s``, for all together, have a TransferTimeoutError (those that
    ``cancelled`` stopped, a TransferCancelledError); the memory of those whose error has a token
    stays pinned until ``TransferAgent.reap`` returns it.
    """

    def __init__(
        self,
        agent: TransferAgent,
        direction: Direction,
        moves: Sequence[BlockMove],
        *,
        local_memory: Memory,
        remote_memory: Memory,
        backend: str,
        timeout_s: float,
        peer: str | None = None,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
        on_done: Callable[[Sequence[int]], None] = lambda _: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        def start(batch: Batch) -> Transfer:
            return agent.start(
                direction, batch.local, batch.remote, local_memory=local_memory,
                remote_memory=remote_memory, backend=backend, own_regions=batch.regions, peer=peer,
            )  # fmt: skip

        self._start = start
        self._moves = moves
        self._on_done = on_done
        self._cancelled = cancelled
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._max_in_flight_bytes = max_in_flight_bytes
        limit_bytes = min(batch_bytes, max_in_flight_bytes)
        self._queue = deque(plan_batches(moves, range(len(moves)), limit_bytes))
        self._under_way: list[tuple[Transfer, Batch]] = []
        self.results: list[TransferError | None] = [None] * len(moves)
        """For each block None, or why it was not moved; complete when it is ``over``."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._queue or self._under_way)

    def step(self) -> bool:
        """Begin what there is room for and look at what is under way; whether there was news."""
        if (reason := self._given_up()) is not None:
            self._give_up(*reason)
            return True
        self._begin_more()
        arrived = self._arrived()
        if arrived:
            self._begin_more()
            for batch in arrived:
                self._on_done(batch.indices)
        return bool(arrived) or not self._under_way

    def abandon(self) -> None:
        """Nobody waits for what is still under way; ``TransferAgent.reap`` will tell of it."""
        for transfer, _ in self._under_way:
            transfer.abandoned = True

    def _begin_more(self) -> None:
        while self._queue and self._has_room(self._queue[0]) and self._given_up() is None:
            batch = self._queue.popleft()
            try:
                transfer = self._start(batch)
                if transfer.done():  # Some backends copy before they return.
                    self._on_done(batch.indices)
                else:
                    self._under_way.append((transfer, batch))
            except TransferError as error:
                self._failed(batch, error)

    def _has_room(self, batch: Batch) -> bool:
        under_way_bytes = sum(batch.size_bytes for _, batch in self._under_way)
        return not under_way_bytes or (
            under_way_bytes + batch.size_bytes <= self._max_in_flight_bytes
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
        if self._cancelled():
            return TransferCancelledError, "cancelled"
        if time.monotonic() >= self._deadline_s:
            return TransferTimeoutError, f"not there after {self._timeout_s} s"
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
