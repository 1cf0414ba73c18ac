"""An event loop whose clock jumps to the next timer: sleeping takes no time and is exact."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, ParamSpec

__all__ = ["VirtualTimeLoop", "in_virtual_time"]

P = ParamSpec("P")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits for timers alone: other threads and sockets do not hold the clock.

    Simulations spend much of their time here. So it orders timers without calling Python, has no
    debug mode, and asks the operating system about sockets only if there are any.
    """

    # Of asyncio's own loops; every release has them.
    _ready: Any
    _selector: Any
    _stopping: bool
    _process_events: Callable[[Any], None]

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _TimerHandle]] = []
        self._numbers = count()
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override] # typeshed has variadic generics
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self._now_s + delay
        handle = _TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        ready, sockets = self._ready, self._selector.get_map()
        while not self._stopping:
            if len(sockets) > 1:  # beside the one that wakes up the loop
                self._process_events(self._selector.select(0))
            if not ready:
                self._let_time_pass()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()

    def _let_time_pass(self) -> None:
        """Until the next timer; without one, until a thread or a socket has something to do."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            self._process_events(self._selector.select(None))
            return
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heappop(timers)[2])


class _Handle(asyncio.Handle):
    """asyncio's, made without asking the loop for its debug mode."""

    __slots__ = ()

    _cancelled: bool
    _context: Context

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True


class _TimerHandle(_Handle, asyncio.TimerHandle):
    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        super().__init__(callback, args, loop, context)
        self._when = when
        self._scheduled = False


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test on a ``VirtualTimeLoop``."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
