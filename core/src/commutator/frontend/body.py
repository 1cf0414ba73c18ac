"""Reads a request's body within its limits, and turns it into a request object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from commutator.errors import RequestError
from commutator.frontend.errors import HttpError, error_response
from commutator.frontend.parse import parse_body, parse_object

__all__ = ["expect", "off_loop", "read_object", "read_request"]

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
    body = await _read(request)
    return await off_loop(len(body), partial(parse_body, body, cls))


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as it came, whatever it holds. Raises as ``read_request`` does."""
    body = await _read(request)
    return await off_loop(len(body), partial(parse_object, body))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """``work`` on a body of ``size`` bytes: in a thread if it would keep others waiting."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


async def _read(request: web.Request) -> bytes:
    # Browsers send text/plain to any site without asking; requiring JSON keeps such pages out.
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise HttpError(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Type: application/json, got {request.content_type[:100]}",
            "unsupported_media_type",
        )
    try:
        return await request.read()
    except (HttpProcessingError, web.RequestPayloadError) as error:
        text = f"the body cannot be read: {_reason(error)}"
        raise RequestError(text, code="invalid_body") from error


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _reason(error: Exception) -> str:
    """In one line: aiohttp's own text of it has a status code and an indented second line."""
    cause = error.__cause__ if isinstance(error, web.RequestPayloadError) else error
    return cause.message if isinstance(cause, HttpProcessingError) else str(error)
