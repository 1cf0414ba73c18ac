"""Sends answers: small ones at once, large ones in parts, so that others are served meanwhile."""

from __future__ import annotations

from aiohttp import web

__all__ = ["send_json", "write_in_parts"]

_PART_BYTES = 256 << 10


async def send_json(request: web.Request, data: bytes) -> web.StreamResponse:
    """The response whose body is the JSON ``data``, sent already if it is large."""
    if len(data) <= _PART_BYTES:
        return web.Response(body=data, content_type="application/json")
    response = web.StreamResponse()
    response.content_type, response.charset = "application/json", "utf-8"
    response.content_length = len(data)
    await response.prepare(request)
    await write_in_parts(response, data)
    await response.write_eof()
    return response


async def write_in_parts(response: web.StreamResponse, data: bytes) -> None:
    """Write ``data`` no faster than the client reads it."""
    view = memoryview(data)
    for start in range(0, len(data), _PART_BYTES):
        await response.write(bytes(view[start : start + _PART_BYTES]))
