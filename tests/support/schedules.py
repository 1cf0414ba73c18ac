"""Schedules of faults by chance: a hundred thousand in several processes, each known by its seed.

Without environment variables a test runs a few, the same ones each time. SCHEDULES=100000, as in
`make test-cluster`, runs that many from a seed that nobody chose; SCHEDULES_FROM=SEED SCHEDULES=1
repeats one that failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from tests.support.virtual_time import VirtualTimeLoop

__all__ = ["MOST_FAULTS", "run_schedule", "run_schedules"]

FaultT = TypeVar("FaultT")

MOST_FAULTS = 8
_BATCH = 200
_SEED_BITS = 40


def run_schedule(work: Coroutine[Any, Any, None]) -> None:
    """Carry out one in virtual time. That each fault is logged, as it should be, is not shown."""
    logging.disable(logging.CRITICAL)
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(work)
    finally:
        logging.disable(logging.NOTSET)


def run_schedules(
    carry_out: Callable[[list[tuple[FaultT, float]]], Coroutine[Any, Any, None]],
    some_fault: Callable[[random.Random], FaultT],
    pauses_s: Sequence[float],
    few: int,
) -> None:
    """Carry out ``few`` schedules, or as many as SCHEDULES says. Raises AssertionError.

    A schedule is faults, with the pause after each. ``carry_out``, a function of a module, raises
    what goes wrong. It may use the module ``random``: its seed is fixed.
    """
    by_chance = partial(_run_by_chance, carry_out, some_fault, pauses_s)
    count = int(os.environ.get("SCHEDULES", "0"))
    first = int(os.environ.get("SCHEDULES_FROM", secrets.randbits(_SEED_BITS) if count else 0))
    began_s = time.monotonic()
    for done, failure in _batches(by_chance, range(first, first + (count or few))):
        if failure is not None:
            seed, text = failure
            raise AssertionError(f"{text}\nrepeat it with SCHEDULES=1 SCHEDULES_FROM={seed}")
        if count:
            print(
                f"{done:,} schedules from seed {first}: {time.monotonic() - began_s:.0f} s",
                flush=True,
            )


Failure = tuple[int, str]


def _run_by_chance(
    carry_out: Callable[[list[tuple[FaultT, float]]], Coroutine[Any, Any, None]],
    some_fault: Callable[[random.Random], FaultT],
    pauses_s: Sequence[float],
    by: random.Random,
) -> None:
    schedule = [(some_fault(by), by.choice(pauses_s)) for _ in range(by.randint(1, MOST_FAULTS))]
    try:
        run_schedule(carry_out(schedule))
    except Exception as error:
        error.add_note(repr(schedule))
        raise


def _batches(
    by_chance: Callable[[random.Random], None], seeds: range
) -> Iterator[tuple[int, Failure | None]]:
    """How many are done, and the first failure, after each batch."""
    batches = [seeds[at : at + _BATCH] for at in range(0, len(seeds), _BATCH)]
    if len(batches) == 1:
        yield len(seeds), _run(by_chance, seeds)
        return
    done = 0
    processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_run, by_chance, batch) for batch in batches]
        try:
            for one in as_completed(running):
                done = min(done + _BATCH, len(seeds))
                yield done, one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run(by_chance: Callable[[random.Random], None], seeds: range) -> Failure | None:
    for seed in seeds:
        random.seed(seed)
        try:
            by_chance(random.Random(seed))
        except Exception:
            return seed, traceback.format_exc()
    return None
