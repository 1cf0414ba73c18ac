"""Says something to clients of streams while there is nothing to say.

Proxies cut connections on which nothing comes, some after fifteen seconds, and an answer may wait
for longer: in a queue, for a long prompt, for another worker. What is sent then begins the answer,
if it has not begun: a failure after that ends a stream with status 200.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_LOOKS = 8
"""At silences in the time that one may last."""


class _Stream(Protocol):
    """An answer in pieces that is to come, or under way."""

    spoke_s: float
    """When the last piece was sent, by ``time.perf_counter``."""

    async def ping(self) -> None:
        """Send something that says nothing. Raises ConnectionError."""


class Silences:
    """The streams of one application. One timer looks at all: one for each would cost each request.

    To be used from one event loop.
    """

    def __init__(self, ping_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """``ping_s``: seconds without a piece after which ``ping`` is called."""
        self._ping_s, self._clock = ping_s, clock
        self._streams: dict[_Stream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pings: set[asyncio.Task[None]] = set()

    def watch(self, stream: _Stream) -> None:
        """Until ``forget``."""
        self._streams[stream] = None
        if self._timer is None:
            self._look_again()

    def forget(self, stream: _Stream) -> None:
        """It ended. Also for one that was never watched."""
        self._streams.pop(stream, None)

    def look(self) -> list[_Stream]:
        """Those that have been silent for too long; their silence begins anew."""
        now = self._clock()
        silent = [one for one in self._streams if now - one.spoke_s >= self._ping_s]
        for one in silent:
            one.spoke_s = now
        return silent

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._ping_s / _LOOKS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for one in self.look():
            task = asyncio.ensure_future(_ping(one))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)
        if self._streams:
            self._look_again()


async def _ping(stream: _Stream) -> None:
    with suppress(ConnectionError):  # the answer's own task gets it as well
        await stream.ping()
