"""Reads a request's body within its limits, and turns it into a request object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from commutator.errors import RequestError
from commutator.schema import StructureError, structure
from commutator_openai.protocol.errors import HttpError, error_response
from commutator_openai.protocol.fields import build_request_converter

__all__ = [
    "NOT_SERVED",
    "expect",
    "off_loop",
    "parse_body",
    "parse_object",
    "read_object",
    "read_request",
]

T = TypeVar("T")

# Parsing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_BYTES = 64 << 10


async def expect(request: web.Request) -> web.Response | None:
    """Answer an ``Expect`` header: continue, or an error in OpenAI's shape."""
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
    """The body as an unchecked JSON object. Raises as ``read_request`` does."""
    body = await _read(request)
    return await off_loop(len(body), partial(parse_object, body))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """``work`` on a body of ``size`` bytes, in a thread if it takes long."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


async def _read(request: web.Request) -> bytes:
    # Browsers send text/plain, and bodies without a type, to any site without asking. Requiring
    # JSON keeps such pages out.
    if not _is_json(request.content_type):
        given = request.content_type[:100] if "Content-Type" in request.headers else "none"
        raise HttpError(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Type: application/json, got {given}",
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
    """The reason in one line; aiohttp's own text adds a status code and a second line."""
    cause = error.__cause__ if isinstance(error, web.RequestPayloadError) else error
    return cause.message if isinstance(cause, HttpProcessingError) else str(error)


NOT_SERVED = "unsupported_parameter"
"""The code of a RequestError for a parameter that is known, but not served here."""

_fast = build_request_converter(detailed=False)
_thorough = build_request_converter(detailed=True)
_SHOWN_PROBLEMS = 8
_SHOWN_CHARACTERS = 200


def parse_body(body: bytes, cls: type[T]) -> T:
    """``body`` as ``cls``. Raises RequestError: ``param`` is the first field that is wrong."""
    data = parse_object(body)
    try:
        return _fast.structure(data, cls)
    except Exception:  # noqa: BLE001 - the thorough converter finds every mistake
        return _parse_thoroughly(data, cls)


def parse_object(body: bytes) -> dict[str, Any]:
    """``body`` as a JSON object. Raises RequestError."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return data


def _parse_thoroughly(data: object, cls: type[T]) -> T:
    try:
        return structure(_thorough, data, cls)
    except StructureError as error:
        problems = error.problems
    shown = [_line(path, text) for path, text in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    # The engine may serve what this front door does not, and judge its messages by itself. What is
    # wrong or unknown beside them is refused here, whatever the engine would say.
    refused = (p for p in problems if not _may_be_served_by_the_engine(*p))
    not_served = (p for p in problems if _code(p[1]) == NOT_SERVED)
    path, text = next(refused, None) or next(not_served, problems[0])
    raise RequestError("; ".join(shown), _shorten(path) or None, _code(text)) from None


def _may_be_served_by_the_engine(path: str, text: str) -> bool:
    return path.startswith(("messages", "prompt")) or _code(text) == NOT_SERVED


def _line(path: str, text: str) -> str:
    return _shorten(f"{path}: {text}" if path else text)


def _code(text: str) -> str:
    by_beginning = {
        "unknown key": "unknown_parameter",
        "required": "missing_required_parameter",
        "not supported": NOT_SERVED,
    }
    found = (code for beginning, code in by_beginning.items() if text.startswith(beginning))
    return next(found, "invalid_value")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
