"""What holds an event loop is found by CPU time, and named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest

from commutator.frontend.loop_watch import LoopWatch, watch_loop


def compute(seconds: float) -> None:
    """By the thread's own CPU time, however busy the machine is."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


async def watched(work: Callable[[], None], times: int) -> list[tuple[float, str]]:
    """What was found in so many turns of ``work``."""
    found: list[tuple[float, str]] = []
    watch = LoopWatch(lambda took_s, seen: found.append((took_s, seen)))
    try:
        for _ in range(times):
            work()
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
    finally:
        watch.close()
    return found


async def test_a_long_turn_is_found_and_named() -> None:
    compute(0.03)  # so that the loop looks busy at once
    found = await watched(partial(compute, 1.5), 1)
    assert len(found) == 1
    took_s, seen = found[0]
    assert 0.05 < took_s < 1.6
    assert "test_loop_watch.compute" in seen


async def test_many_short_turns_are_none() -> None:
    assert await watched(partial(compute, 0.005), 200) == []


async def test_a_turn_that_waits_for_something_else_is_none() -> None:
    """A paused or busy machine is slow; that is not the front door's work."""
    assert await watched(partial(time.sleep, 0.3), 1) == []


async def test_it_is_counted_and_the_log_has_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[float] = []
    now_s = 0.0
    watching = asyncio.create_task(watch_loop(counted.append, lambda: now_s))
    for number in range(3):
        now_s = (0.0, 59.0, 61.0)[number]
        while len(counted) <= number:
            await asyncio.sleep(0.05)
            compute(0.5)
    watching.cancel()
    assert len([line for line in caplog.messages if "everyone waited while" in line]) == 2
