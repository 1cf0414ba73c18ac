"""Retries, the circuit breaker and the bandwidth limit, with a clock that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from commutator.contract.block import BlockDescriptor
from commutator.contract.tier import Span, StoredBlock
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import BlockIo, LoadBlock, StoreBlock, Unstored
from commutator_engine_kit.kv.tiers.guards import (
    Bandwidth,
    Breaker,
    BreakerState,
    GuardedIo,
    IoGuards,
    RetryBudget,
)
from commutator_engine_kit.kv.tiers.mover import IoContext

LOADED, FAILED = LoadResult.LOADED, LoadResult.FAILED
CORRUPT, MISSING = LoadResult.CORRUPT, LoadResult.MISSING
WRITTEN, UNWRITTEN = True, Unstored("the disk is away")
Outcome = LoadResult | bool | Unstored


def stored(slot: int, size_bytes: int = 100) -> StoredBlock:
    return StoredBlock(key=slot.to_bytes(32, "big"), slot=slot, size_bytes=size_bytes, checksum=0)


def to_load(count: int) -> list[LoadBlock]:
    return [LoadBlock(stored=stored(slot), local=Span(slot, 100)) for slot in range(count)]


def to_store(count: int) -> list[StoreBlock]:
    return [
        StoreBlock(
            offer=BlockDescriptor(key=slot.to_bytes(32, "big"), parent=None, token_ids=()),
            slot=slot,
            local=Span(0, 100),
        )
        for slot in range(count)
    ]


class Script(BlockIo):
    """Answers each call with the next list of outcomes; remembers the slots it was asked for."""

    def __init__(self, *answers: Sequence[Outcome]) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []

    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        self.asked.append([block.slot for block in blocks])
        outcomes = zip(blocks, self.answers.pop(0), strict=True)
        return [one if isinstance(one, Unstored) else stored(block.slot) for block, one in outcomes]

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        self.asked.append([block.stored.slot for block in blocks])
        answer = self.answers.pop(0)
        assert len(answer) == len(blocks)
        return [LoadResult(one) for one in answer]


class Explodes(BlockIo):
    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        raise RuntimeError("a bug")

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        raise RuntimeError("a bug")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.slept.append(pause_s)
        self.now_s += pause_s


def soon(timeout_s: float = 60.0, cancelled: Callable[[], bool] = lambda: False) -> IoContext:
    return IoContext(time.monotonic() + timeout_s, cancelled)


def guarded(
    io: BlockIo,
    clock: Clock,
    breaker: Breaker | None = None,
    *,
    attempts: int = 1,
    budget: RetryBudget | None = None,
    bandwidth: Bandwidth | None = None,
) -> GuardedIo:
    guards = IoGuards(
        breaker=breaker or Breaker(),
        max_attempts=attempts,
        budget=budget or RetryBudget(),
        bandwidth=bandwidth,
    )
    return GuardedIo(io, "dram", guards, clock=clock, sleep=clock.sleep)


def test_only_what_failed_is_tried_again_and_each_result_stays_with_its_block() -> None:
    script = Script([LOADED, FAILED, MISSING, FAILED, CORRUPT], [FAILED, LOADED], [LOADED])
    clock = Clock()
    io = guarded(script, clock, attempts=3)
    assert io.load(to_load(5), soon()) == [LOADED, LOADED, MISSING, LOADED, CORRUPT]
    assert script.asked == [[0, 1, 2, 3, 4], [1, 3], [1]]
    assert clock.slept == [0.02, 0.04]


def test_retries_end_with_their_budget_and_successes_earn_more() -> None:
    budget = RetryBudget(ratio=0.5, most=4, saved=1)
    script = Script([FAILED] * 3, [FAILED], [FAILED] * 3, [LOADED] * 6, [FAILED] * 5, [FAILED] * 3)
    io = guarded(script, Clock(), attempts=2, budget=budget)
    assert io.load(to_load(3), soon()) == [FAILED] * 3
    assert io.load(to_load(3), soon()) == [FAILED] * 3
    assert script.asked[1:] == [[0], [0, 1, 2]], "nothing was left for the second call"
    io.load(to_load(6), soon())
    assert budget.saved == 3
    io.load(to_load(5), soon())
    assert script.asked[-1] == [0, 1, 2]


def test_the_budget_is_bounded() -> None:
    budget = RetryBudget(ratio=1, most=4, saved=0)
    budget.earned(1000)
    assert budget.take(1000) == 4
    assert budget.take(1) == 0


@pytest.mark.parametrize(
    "context", [soon(0.01), soon(cancelled=lambda: True)], ids=["too late", "cancelled"]
)
def test_nothing_is_tried_again_in_vain(context: IoContext) -> None:
    script = Script([FAILED])
    assert guarded(script, Clock(), attempts=3).load(to_load(1), context) == [FAILED]


def test_the_breaker_opens_tries_once_and_waits_longer_each_time() -> None:
    breaker = Breaker(max_failures=2, pause_s=1, max_pause_s=3)
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(0.0)
    assert not breaker.allows(0.9)
    now_s = 0.0
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        assert breaker.state(now_s + pause_s - 0.01) is BreakerState.OPEN
        now_s += pause_s
        assert breaker.state(now_s) is BreakerState.HALF_OPEN
        assert breaker.allows(now_s)
        assert not breaker.allows(now_s), "one job at a time is the trial"
        breaker.failed(now_s)
    assert breaker.allows(now_s + 3)
    breaker.succeeded()
    assert breaker.state(now_s + 3) is BreakerState.CLOSED
    breaker.failed(now_s + 3)
    assert breaker.allows(now_s + 3), "it counts from zero again"


def test_a_trial_that_was_cancelled_is_followed_by_another() -> None:
    breaker = Breaker(max_failures=1, pause_s=1)
    breaker.failed(0.0)
    assert breaker.allows(1.0)
    breaker.given_up()
    assert breaker.allows(1.0)


def test_one_block_that_gets_through_keeps_the_breaker_closed() -> None:
    script = Script(*([[FAILED, LOADED]] * 4), [FAILED, FAILED])
    breaker = Breaker(max_failures=1)
    io = guarded(script, Clock(), breaker)
    for _ in range(4):
        io.load(to_load(2), soon())
    assert breaker.state(0.0) is BreakerState.CLOSED
    io.load(to_load(2), soon())
    assert breaker.state(0.0) is BreakerState.OPEN
    assert io.load(to_load(2), soon()) == [FAILED, FAILED]
    results = io.store(to_store(1), soon())
    assert isinstance(results[0], Unstored)
    assert len(script.asked) == 5, "an open breaker lets nothing through"


def test_corrupt_and_missing_blocks_do_not_open_the_breaker() -> None:
    script = Script([CORRUPT], [MISSING])
    breaker = Breaker(max_failures=1)
    io = guarded(script, Clock(), breaker)
    io.load(to_load(1), soon())
    io.load(to_load(1), soon())
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_cancelled_jobs_do_not_open_the_breaker() -> None:
    breaker = Breaker(max_failures=1)
    io = guarded(Script([FAILED]), Clock(), breaker)
    io.load(to_load(1), soon(cancelled=lambda: True))
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_a_trial_that_raises_is_a_failed_one() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=1, pause_s=1)
    io = guarded(Explodes(), clock, breaker)
    for _ in range(2):
        assert io.load(to_load(1), soon()) == [FAILED]
        assert breaker.state(clock.now_s) is BreakerState.OPEN
        clock.now_s += 10
    assert isinstance(io.store(to_store(1), soon())[0], Unstored)
    assert breaker.state(clock.now_s) is BreakerState.OPEN
    clock.now_s += 10
    assert breaker.state(clock.now_s) is BreakerState.HALF_OPEN


def test_the_bandwidth_limit_spreads_jobs_over_time() -> None:
    clock = Clock()
    script = Script([LOADED] * 10, [WRITTEN] * 5, [LOADED])
    io = guarded(script, clock, bandwidth=Bandwidth(1000))
    io.load(to_load(10), soon())
    io.store(to_store(5), soon())
    io.load(to_load(1), soon())
    assert clock.slept == [1.0, 0.5], "1000 bytes, then 500, at 1000 bytes a second"
    clock.now_s += 10
    script.answers.append([LOADED])
    io.load(to_load(1), soon())
    assert len(clock.slept) == 2, "time that was not used does not add up, nor is it waited for"


def test_the_bandwidth_is_shared_by_all_that_moves_to_and_from_one_tier() -> None:
    clock = Clock()
    bandwidth = Bandwidth(1000)
    first, second = (guarded(Script([LOADED] * 10), clock, bandwidth=bandwidth) for _ in range(2))
    first.load(to_load(10), soon())
    second.load(to_load(10), soon())
    assert clock.slept == [1.0]


def test_what_the_limit_leaves_no_time_for_fails_untried_and_costs_nothing() -> None:
    clock = Clock()
    script = Script([LOADED] * 10, [LOADED])
    io = guarded(script, clock, bandwidth=Bandwidth(100))
    io.load(to_load(10), soon())
    assert io.load(to_load(1), soon(5)) == [FAILED]
    assert isinstance(io.store(to_store(1), soon(5))[0], Unstored)
    assert io.load(to_load(1), soon(60)) == [LOADED]
    assert clock.slept == [10.0]
