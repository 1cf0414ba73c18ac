"""Threads for work that would hold the event loop: parsing, rendering, tokenizing, encoding."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from commutator.errors import OverloadedError

T = TypeVar("T")

_MAX_THREADS = 8
_MAX_WAITING = 1024

WORKING_FOR: contextvars.ContextVar[str] = contextvars.ContextVar("working_for", default="")
"""The name of the principal whose request is handled; principals take turns at the threads."""


class WorkPool:
    """A few threads with a bounded queue. Used from one event loop.

    Principals take turns, each with its oldest piece of work, so that one who has much does not
    keep the others waiting. Work whose request is cancelled while it waits is never begun. A thread
    cannot be interrupted, so callers bound how long their work takes, or divide it into steps.
    """

    def __init__(self, threads: int | None = None, max_waiting: int = _MAX_WAITING) -> None:
        """By default as many threads as processors, and at most 8."""
        count = threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="commutator-work")
        self._max_pending = count + max_waiting
        self._pending = 0
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By principal, the one whose turn it is first. None of them is empty."""
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
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(work)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if refusable and self._pending >= self._max_pending:
                raise OverloadedError(
                    f"{self._pending} long prompts wait to be processed; try again soon",
                    reason="too_much_work",
                )
            self._pending += 1
            self._waiting.setdefault(WORKING_FOR.get(), deque()).append(begin)
        future.add_done_callback(self._done)
        self._executor.submit(self._take_turn)
        return await asyncio.wrap_future(future)

    async def run_in_steps(self, steps: Generator[None, None, T], *, refusable: bool = True) -> T:
        """What ``steps`` returns; the threads may turn to others wherever it yields.

        Raises OverloadedError when the queue is full at the beginning, as ``run`` does.
        """

        def step() -> tuple[T] | None:
            try:
                next(steps)
            except StopIteration as end:
                return (end.value,)
            return None

        done = await self.run(step, refusable=refusable)
        while done is None:
            done = await self.run(step, refusable=False)
        return done[0]

    def _take_turn(self) -> None:
        """Called once for each piece of work, in any thread."""
        with self._lock:
            who = next(iter(self._waiting))
            mine = self._waiting.pop(who)
            begin = mine.popleft()
            if mine:
                self._waiting[who] = mine  # behind the others
        begin()

    def _done(self, _: Future[Any]) -> None:
        """Also of work that was cancelled before it began; called in any thread."""
        with self._lock:
            self._pending -= 1
