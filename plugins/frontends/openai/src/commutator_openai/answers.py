"""Sends answers: small ones at once, large ones in parts, so that others are served meanwhile."""

from __future__ import annotations

import asyncio

from aiohttp import web

__all__ = ["send_json", "write_in_parts"]

_PART_BYTES = 256 << 10


async def send_json(request: web.Request, parts: list[bytes]) -> web.StreamResponse:
    """The response whose body is the JSON of all ``parts``, sent already if it is large.

    The list is empty then: a part is given up once it is sent, since to free much takes long.
    """
    size = sum(map(len, parts))
    if size <= _PART_BYTES:
        return web.Response(body=b"".join(parts), content_type="application/json")
    response = web.StreamResponse()
    response.content_type, response.charset = "application/json", "utf-8"
    response.content_length = size
    await response.prepare(request)
    parts.reverse()
    while parts:
        await write_in_parts(response, parts.pop())
        await asyncio.sleep(0)  # a client that reads fast does not keep the others waiting
    await response.write_eof()
    return response


async def write_in_parts(response: web.StreamResponse, data: bytes) -> None:
    """Write ``data`` no faster than the client reads it."""
    view = memoryview(data)
    for start in range(0, len(data), _PART_BYTES):
        if start:
            await asyncio.sleep(0)
        await response.write(bytes(view[start : start + _PART_BYTES]))
