"""Reads a request's body within its limits, and turns it into a request object."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from commutator.errors import RequestError
from commutator.frontend.errors import HttpError, error_response
from commutator.frontend.parse import parse_body

__all__ = ["expect", "read_request"]

T = TypeVar("T")

# Parsing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_BYTES = 64 << 10


async def expect(request: web.Request) -> web.Response | None:
    """Answer an ``Expect`` header: that the client may go on, or an error in OpenAI's shape."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        status = web.HTTPExpectationFailed.status_code
        text = f"expected Expect: 100-continue or none, got {expected[:100]}"
        return error_response(HttpError(status, text, "expectation_failed"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun
    return None


async def read_request(request: web.Request, cls: type[T]) -> T:
    """The body as ``cls``. Raises RequestError, or HttpError for 413 and 415."""
    # Browsers send text/plain to any site without asking; requiring JSON keeps such pages out.
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise HttpError(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Type: application/json, got {request.content_type[:100]}",
            "unsupported_media_type",
        )
    try:
        body = await request.read()
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise RequestError(f"the body cannot be read: {error}", code="invalid_body") from error
    if len(body) <= _INLINE_BYTES:
        return parse_body(body, cls)
    return await asyncio.to_thread(parse_body, body, cls)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
