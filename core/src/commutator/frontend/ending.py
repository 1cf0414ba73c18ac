"""Ends a response that has begun and then failed: its status is sent already."""

from __future__ import annotations

import asyncio

from aiohttp import web

from commutator.frontend.errors import HttpError
from commutator.frontend.exchange import EXCHANGE
from commutator.frontend.shape import event

__all__ = ["end_failed"]

_GRACE_S = 1.0
"""A client may take this long to read what it was sent last."""


async def end_failed(request: web.Request, response: web.StreamResponse, answer: HttpError) -> None:
    """An event stream ends with an error event, anything else without its end.

    Raises ConnectionError when the client is gone.
    """
    if response.content_type == "text/event-stream" and not request[EXCHANGE].ended:
        await _write_last(request, response, event(answer.body()))
    else:
        _abort_later(request)
        _close(request)


async def _write_last(request: web.Request, response: web.StreamResponse, last: bytes) -> None:
    slow = _abort_later(request)
    try:
        await response.write_eof(last)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # A write that the time limit cancelled has left its cancelled waiter in aiohttp, which
        # this one met. Its data is on the way, but the connection is of no use any more.
        _close(request)
    else:
        slow.cancel()


def _close(request: web.Request) -> None:
    """Once all is sent."""
    if request.transport is not None:
        request.transport.close()


def _abort_later(request: web.Request) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(_GRACE_S, _abort, request)


def _abort(request: web.Request) -> None:
    """Sent or not. A connection that is lost has no transport any more."""
    if request.transport is not None:
        request.transport.abort()
