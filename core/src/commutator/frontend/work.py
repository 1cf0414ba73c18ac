"""Threads for work that would hold the event loop: parsing, rendering, tokenizing, encoding."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from commutator.errors import OverloadedError

__all__ = ["WorkPool"]

T = TypeVar("T")

_MAX_THREADS = 8
_MAX_WAITING = 1024


class WorkPool:
    """A few threads with a bounded queue. Used from one event loop.

    Work whose request is cancelled while it waits is never begun. A thread cannot be interrupted,
    so callers bound how long their work takes.
    """

    def __init__(self, threads: int | None = None, max_waiting: int = _MAX_WAITING) -> None:
        """By default as many threads as processors, and at most 8."""
        count = threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="commutator-work")
        self._max_pending = count + max_waiting
        self._pending = 0
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Pieces of work that run or wait."""
        return self._pending

    async def run(self, work: Callable[[], T], *, refusable: bool = True) -> T:
        """The result of ``work`` in a thread.

        Raises OverloadedError when the queue is full and ``work`` is ``refusable``; what completes
        an answer is not.
        """
        with self._lock:
            if refusable and self._pending >= self._max_pending:
                raise OverloadedError(
                    f"{self._pending} long prompts wait to be processed; try again soon",
                    reason="too_much_work",
                )
            self._pending += 1
        future = self._executor.submit(contextvars.copy_context().run, work)
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def _done(self, _: Future[T]) -> None:
        """Also of work that was cancelled before it began; called in any thread."""
        with self._lock:
            self._pending -= 1
