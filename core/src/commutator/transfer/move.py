"""Moves many blocks by few transfers, and tells of each block what became of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field

from commutator.errors import TransferCancelledError, TransferError, TransferTimeoutError
from commutator.transfer.agent import TransferAgent
from commutator.transfer.plan import Batch, BlockMove, plan_batches
from commutator.transfer.spans import Direction, Memory
from commutator.transfer.transfer import Transfer, poll_pause_s

__all__ = ["BATCH_BYTES", "MAX_IN_FLIGHT_BYTES", "move_blocks"]

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

    A transfer takes up to ``batch_bytes``, and up to ``max_in_flight_bytes`` are under way at
    a time (one block at least). ``on_done`` is called with the positions of blocks that have
    arrived, while later ones are under way: the place to verify them, on another thread best.

    When a transfer of several blocks fails, each of them is tried once by itself. Blocks that are
    not there after ``timeout_s``, for all together, have a TransferTimeoutError (those that
    ``cancelled`` stopped, a TransferCancelledError); the memory of those whose error has a token
    stays pinned until ``TransferAgent.reap`` returns it.
    """

    def start(batch: Batch) -> Transfer:
        return agent.start(
            direction, batch.local, batch.remote, local_memory=local_memory,
            remote_memory=remote_memory, backend=backend, own_regions=batch.regions, peer=peer,
        )  # fmt: skip

    limit_bytes = min(batch_bytes, max_in_flight_bytes)
    run = _Run(
        moves=moves, start=start, max_in_flight_bytes=max_in_flight_bytes, on_done=on_done,
        cancelled=cancelled, deadline_s=time.monotonic() + timeout_s, timeout_s=timeout_s,
        queue=deque(plan_batches(moves, range(len(moves)), limit_bytes)),
    )  # fmt: skip
    try:
        run.to_end()
    finally:
        for transfer, _ in run.under_way:
            transfer.abandoned = True
    return run.results


@define(kw_only=True)
class _Run:
    moves: Sequence[BlockMove]
    start: Callable[[Batch], Transfer]
    on_done: Callable[[Sequence[int]], None]
    cancelled: Callable[[], bool]
    deadline_s: float
    timeout_s: float
    max_in_flight_bytes: int
    queue: deque[Batch]
    under_way: list[tuple[Transfer, Batch]] = field(factory=list)
    results: list[TransferError | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.results = [None] * len(self.moves)

    def to_end(self) -> None:
        news_s = time.monotonic()
        while self.queue or self.under_way:
            if (reason := self._given_up()) is not None:
                self._give_up(*reason)
                return
            self._begin_more()
            arrived = self._arrived()
            if arrived:
                self._begin_more()
                for batch in arrived:
                    self.on_done(batch.indices)
                news_s = time.monotonic()
            elif self.under_way:
                time.sleep(poll_pause_s(time.monotonic() - news_s))

    def _begin_more(self) -> None:
        while self.queue and self._has_room(self.queue[0]) and self._given_up() is None:
            batch = self.queue.popleft()
            try:
                transfer = self.start(batch)
                if transfer.done():  # Some backends copy before they return.
                    self.on_done(batch.indices)
                else:
                    self.under_way.append((transfer, batch))
            except TransferError as error:
                self._failed(batch, error)

    def _has_room(self, batch: Batch) -> bool:
        under_way_bytes = sum(batch.size_bytes for _, batch in self.under_way)
        return not under_way_bytes or (
            under_way_bytes + batch.size_bytes <= self.max_in_flight_bytes
        )

    def _arrived(self) -> list[Batch]:
        arrived, remaining = [], []
        for transfer, batch in self.under_way:
            try:
                if transfer.done():
                    arrived.append(batch)
                else:
                    remaining.append((transfer, batch))
            except TransferError as error:
                self._failed(batch, error)
        self.under_way = remaining
        return arrived

    def _failed(self, batch: Batch, error: TransferError) -> None:
        if len(batch.indices) == 1:
            self.results[batch.indices[0]] = error
        else:
            self.queue.extendleft(reversed(plan_batches(self.moves, batch.indices, 0)))

    def _given_up(self) -> tuple[type[TransferTimeoutError], str] | None:
        if self.cancelled():
            return TransferCancelledError, "cancelled"
        if time.monotonic() >= self.deadline_s:
            return TransferTimeoutError, f"not there after {self.timeout_s} s"
        return None

    def _give_up(self, kind: type[TransferTimeoutError], why: str) -> None:
        for transfer, batch in self.under_way:
            for index in batch.indices:
                self.results[index] = kind(f"block {index}: {why}", transfer.token)
        for batch in self.queue:
            for index in batch.indices:
                self.results[index] = kind(f"block {index}: {why}, and never begun")
