"""One request's deltas on their way from a connection to whoever awaits them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from commutator.types import TokenDelta, TokenLogprob

__all__ = ["DeltaStream"]


class DeltaStream:
    """An async iterator that a connection feeds. Deltas that pile up come out as one.

    Merging means that a reader that is slower than the engine does one write for several ticks.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._ready: deque[TokenDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ended = False
        """The engine finished or failed the request; nothing more comes."""
        self._exhausted = False

    def feed(self, delta: TokenDelta) -> None:
        self._ready.append(delta)
        if delta.finish_reason is not None:
            self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what has already arrived."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._ready:
            if self._exhausted or (self._ended and self._error is None):
                raise StopAsyncIteration
            if self._error is not None:
                self._exhausted = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(self._ready) == 1:
            return self._ready.popleft()
        merged = merge(self._ready)
        self._ready.clear()
        return merged

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort()
        self._ready.clear()
        self._exhausted = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(deltas: deque[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one request as one."""
    last, cached = deltas[-1], None
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        cached = delta.cached_tokens if cached is None else cached
    return TokenDelta(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cached_tokens=cached,
        handover=last.handover,
        error=last.error,
        handover_failed=last.handover_failed,
    )
