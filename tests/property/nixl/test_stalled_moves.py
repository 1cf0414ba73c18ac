"""Moves are given up where no block arrives for too long, and never while blocks arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.tier import Direction, Memory, Span
from commutator.errors import TransferTimeoutError
from commutator_engine_kit.nixl import moves
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks

STALL_S = 1.0
STEP_S = 0.01
BLOCK_BYTES = 1 << 20


@define
class Clock:
    """Advances only while someone sleeps."""

    now_s: float = 0.0

    def sleep(self, _: float) -> None:
        self.now_s += STEP_S


@define
class OneByOne:
    """An agent whose transfers each end a given time after they began."""

    clock: Clock
    takes_s: Sequence[float]
    begun: int = 0

    def start(self, *_: Any) -> Any:
        ends_s = self.clock.now_s + self.takes_s[self.begun]
        self.begun += 1
        return SimpleNamespace(done=lambda: self.clock.now_s >= ends_s, token=self.begun)


@contextmanager
def clock_of_moves() -> Iterator[Clock]:
    clock = Clock()
    time = SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep)
    with mock.patch.object(moves, "time", time):
        yield clock


@given(st.lists(st.floats(0.0, 1.5 * STALL_S), min_size=1, max_size=20))
def test_blocks_arrive_until_one_takes_too_long(takes_s: list[float]) -> None:
    some = [BlockMove(Span(at, BLOCK_BYTES), Span(at, BLOCK_BYTES)) for at in range(len(takes_s))]
    path = TransferPath(Direction.READ, Memory.DRAM, Memory.FILE, "POSIX")
    limits = MoveLimits(
        timeout_s=1_000.0,
        batch_bytes=BLOCK_BYTES,
        max_in_flight_bytes=BLOCK_BYTES,
        stall_s=STALL_S,
    )
    with clock_of_moves() as clock:
        results = move_blocks(cast(TransferAgent, OneByOne(clock, takes_s)), path, some, limits)
    good = [found is None for found in results]
    arrived = good.index(False) if False in good else len(good)
    assert not any(good[arrived:])
    for one_s in takes_s[:arrived]:
        assert one_s < STALL_S + 2 * STEP_S
    if arrived < len(takes_s):
        assert takes_s[arrived] > STALL_S - 2 * STEP_S
        first = results[arrived]
        assert isinstance(first, TransferTimeoutError)
        assert first.token == arrived + 1, "its memory is held until it ends"
        assert "nothing arrived for 1.0 s" in str(first)
        assert clock.now_s <= sum(takes_s[:arrived]) + STALL_S + (arrived + 2) * 2 * STEP_S
