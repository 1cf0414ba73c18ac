"""Finds what holds the event loop of a front door: a turn that computes while everyone waits.

Time by the clock says little, as a busy machine or a paused one is slow; the CPU time of the loop's
thread is what its callbacks took. A second thread looks at it, and at what runs meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

LONG_TURN_S = 0.05
_LOOK_S = 0.02
_BUSY = 0.25
"""Of the time between two looks that the loop computed, after which it is asked for a turn."""
_TELL_EVERY_S = 60.0
_FRAMES = 3


async def watch_loop(
    count: Callable[[float], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Watch the loop that runs this, until cancelled.

    ``count`` gets the seconds of each long turn; the log has one of them a minute.
    """
    told_s = -math.inf

    def on_long(took_s: float, seen: str) -> None:
        nonlocal told_s
        count(took_s)
        if clock() - told_s >= _TELL_EVERY_S:
            told_s = clock()
            what = seen or "something that had ended when it was looked for"
            log.warning("everyone waited while %s computed for %.0f ms", what, 1e3 * took_s)

    watch = LoopWatch(on_long)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        watch.close()


class LoopWatch:
    """Watches the loop that runs where it is made; ``on_long`` is called there.

    It gets the seconds of CPU for which the loop gave nobody else a turn, and what was seen to run,
    innermost first, "" if it ended too soon to be seen. Two turns in a row may be taken for one.
    """

    def __init__(self, on_long: Callable[[float, str], None]) -> None:
        self._on_long = on_long
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._watched)
        self._asked_s: float | None = None
        """The thread's CPU time when the loop was asked for a turn that it has not had yet."""
        self._seen = ""
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self._stop.set()

    def _watch(self) -> None:
        before_s = time.clock_gettime(self._clock)
        while not self._stop.wait(_LOOK_S):
            now_s = time.clock_gettime(self._clock)
            asked_s = self._asked_s
            if asked_s is not None:
                if now_s - asked_s > LONG_TURN_S / 2:
                    running = sys._current_frames().get(self._watched)  # noqa: SLF001 - public
                    self._seen = _what_runs(running) or self._seen
            elif now_s - before_s > _BUSY * _LOOK_S:
                self._seen, self._asked_s = "", now_s
                try:
                    self._loop.call_soon_threadsafe(self._turn)
                except RuntimeError:  # the loop is closed
                    return
            before_s = now_s

    def _turn(self) -> None:
        asked_s = self._asked_s
        assert asked_s is not None
        took_s = time.thread_time() - asked_s
        if took_s >= LONG_TURN_S and not self._stop.is_set():
            self._on_long(took_s, self._seen)
        self._asked_s = None


def _what_runs(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < _FRAMES:
        code = frame.f_code
        names.append(f"{frame.f_globals.get('__name__', '?')}.{code.co_name}")
        frame = frame.f_back
    return "" if names[:1] == ["selectors.select"] else " < ".join(names)  # the turn is over
