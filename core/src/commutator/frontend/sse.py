"""Server-sent events to one client. The response begins with the first event."""

from __future__ import annotations

from aiohttp import web

from commutator.frontend.exchange import EXCHANGE
from commutator.frontend.shape import event

__all__ = ["EventStream"]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells nginx to pass events on at once
}


class _Response(web.StreamResponse):
    # The first event follows its headers at once: one packet, as with aiohttp's own web.Response.
    _send_headers_immediately = False


class EventStream:
    """Until the first write, a failure can still be answered with its own status.

    What fails later is raised as well, and ended by ``commutator.frontend.middleware``.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse = _Response(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send events, all in one write."""
        if events:
            await self._start()
            await self.response.write(events)

    async def finish(self, events: bytes) -> None:
        """Send the last events and the end mark, all in one write."""
        await self._start()
        self._request[EXCHANGE].ended = True
        await self.response.write_eof(events + event(b"[DONE]"))

    async def _start(self) -> None:
        if not self.started:
            await self.response.prepare(self._request)
