"""Schedules of faults by chance: a hundred thousand in several processes, each known by its seed.

Without environment variables a test runs a few, the same ones each time. SCHEDULES=100000, as in
`make test-cluster`, runs that many from a seed that nobody chose; SCHEDULES_FROM=SEED SCHEDULES=1
repeats one that failed.
"""

from __future__ import annotations

import os
import random
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

__all__ = ["run_schedules"]

_BATCH = 200
_SEED_BITS = 40


def run_schedules(carry_out: Callable[[random.Random], None], few: int) -> None:
    """Carry out ``few`` schedules, or as many as SCHEDULES says. Raises AssertionError.

    ``carry_out``, a function of a module, makes the schedule from the generator that it is given,
    and raises what goes wrong. It may use the module ``random`` otherwise: its seed is fixed, too.
    """
    count = int(os.environ.get("SCHEDULES", "0"))
    first = int(os.environ.get("SCHEDULES_FROM", secrets.randbits(_SEED_BITS) if count else 0))
    began_s = time.monotonic()
    for done, failure in _batches(carry_out, range(first, first + (count or few))):
        if failure is not None:
            seed, text = failure
            raise AssertionError(f"{text}\nrepeat it with SCHEDULES=1 SCHEDULES_FROM={seed}")
        if count:
            print(f"{done:,} schedules from seed {first}: {time.monotonic() - began_s:.0f} s")


Failure = tuple[int, str]


def _batches(
    carry_out: Callable[[random.Random], None], seeds: range
) -> Iterator[tuple[int, Failure | None]]:
    """How many are done, and the first failure, after each batch."""
    batches = [seeds[at : at + _BATCH] for at in range(0, len(seeds), _BATCH)]
    if len(batches) == 1:
        yield len(seeds), _run(carry_out, seeds)
        return
    done = 0
    processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_run, carry_out, batch) for batch in batches]
        try:
            for one in as_completed(running):
                done = min(done + _BATCH, len(seeds))
                yield done, one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run(carry_out: Callable[[random.Random], None], seeds: range) -> Failure | None:
    for seed in seeds:
        random.seed(seed)
        try:
            carry_out(random.Random(seed))
        except Exception:
            return seed, traceback.format_exc()
    return None
