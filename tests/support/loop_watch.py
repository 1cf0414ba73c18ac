"""Measures how much processor time one turn of an event loop takes, and what did it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LoopWatch", "WatchedLoop", "serving_in_a_thread", "times_slower"]

_SUMMING_S = 0.0055
"""What ``times_slower`` measures, on the machine of the documented figures."""


def times_slower() -> float:
    """How many times slower this machine is than that of the documented figures; at least 1."""
    best_s = 1.0
    for _ in range(20):
        begun_s = time.thread_time()
        total = 0
        for number in range(200_000):
            total += number
        best_s = min(best_s, time.thread_time() - begun_s)
    return max(1.0, best_s / _SUMMING_S)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes its longest turn.

    A turn is measured by the processor time of the loop's own thread, which other processes and
    threads on a busy machine do not lengthen. Waiting for sockets takes none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0

    def _run_once(self) -> None:
        begun_s = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - begun_s)


class LoopWatch:
    """The longest turn of a loop since the last ``reset``."""

    def __init__(self, loop: WatchedLoop) -> None:
        self._loop = loop

    def reset(self) -> None:
        """Waits for the turn that runs now."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(done.set)
        done.wait(60)
        self._loop.longest_s = 0.0

    def longest_s(self) -> float:
        """Also of the turn that runs now."""
        for _ in range(2):
            done = threading.Event()
            self._loop.call_soon_threadsafe(done.set)
            assert done.wait(60), "the loop does not turn"
        return self._loop.longest_s


@contextmanager
def serving_in_a_thread(make: Any) -> Iterator[tuple[Any, LoopWatch]]:
    """``make()`` is an async context manager; its value, and the watch of the loop it runs on."""
    loop = WatchedLoop()
    started, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with make() as value:
            found.append(value)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(30), "nothing serves"
    try:
        yield found[0], LoopWatch(loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
