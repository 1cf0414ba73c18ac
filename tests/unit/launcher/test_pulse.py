"""Whether a process hangs: what is seen of real ones, and what follows from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from commutator.launcher.pulse import LOOK_EVERY_S, Pulse, Vitals, until_it_hangs, vitals_of

SLEEPS = "print(flush=True); import time; time.sleep(600)"
COMPUTES = "print(flush=True)\nwhile True: pass"
OF_ANOTHER = (
    "import subprocess, sys\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(p.pid, flush=True); p.wait()"
)


@contextmanager
def running(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_process_that_sleeps_and_owes_an_answer_hangs() -> None:
    with running(SLEEPS) as (process, _):
        async with asyncio.timeout(30):
            assert "waits for something" in await until_it_hangs(process.pid, never)


async def test_a_process_that_computes_does_not_hang() -> None:
    with running(COMPUTES) as (process, _):
        waiting = asyncio.create_task(until_it_hangs(process.pid, never))
        done, _ = await asyncio.wait({waiting}, timeout=12 * LOOK_EVERY_S)
        assert not done
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30):
            assert "is stopped" in await waiting


async def test_a_child_that_is_stopped_makes_its_parent_hang() -> None:
    with running(OF_ANOTHER) as (process, child):
        assert set(vitals_of(process.pid)) == {process.pid, int(child)}
        os.kill(int(child), signal.SIGSTOP)
        async with asyncio.timeout(30):
            assert "a child of it" in await until_it_hangs(process.pid, None)


async def test_what_answers_does_not_hang_even_by_an_error() -> None:
    async def fails() -> None:
        raise OSError("refused")

    with running(SLEEPS) as (process, _):
        waiting = asyncio.create_task(until_it_hangs(process.pid, fails))
        done, _ = await asyncio.wait({waiting}, timeout=12 * LOOK_EVERY_S)
        assert not done
        waiting.cancel()


def test_a_process_that_has_ended_has_no_vitals() -> None:
    with running(SLEEPS) as (process, _):
        pass
    assert vitals_of(process.pid) == {}


LOOKS = st.lists(st.tuples(st.sampled_from("RSDTt"), st.integers(0, 1), st.integers(0, 1)))


@given(looks=LOOKS, owes=st.booleans())
def test_only_a_process_that_stands_still_hangs(
    looks: list[tuple[str, int, int]], owes: bool
) -> None:
    """Each look: the state, and whether the first thread and any thread has run since the last."""
    pulse, ran_ns, ticks, still, stopped = Pulse(1), 0, 0, 0, 0
    for number, (state, ran, ticked) in enumerate(looks):
        ran_ns, ticks = ran_ns + ran, ticks + (ran or ticked)
        now = Vitals(state=state, ran_ns=ran_ns, cpu_ticks=ticks)
        problem = pulse.saw({1: now}, owes=owes)
        still = still + 1 if number and owes and state in "SD" and not ran else 0
        stopped = stopped + 1 if state == "T" else 0
        hangs = stopped >= 6 or still >= (20 if ticked else 6)
        assert (problem is not None) is hangs
