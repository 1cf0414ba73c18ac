"""Reads a request's body within its limits, and turns it into a request object.

What the headers tell is checked before the first byte of the body is read: its type, its length,
and whether there is room for one more request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from attrs import field, frozen

from commutator.errors import RequestError
from commutator.frontend import ByteBudget
from commutator.schema import StructureError, structure
from commutator_openai.inflate import CODINGS, InflateError, Inflater
from commutator_openai.middleware import EXCHANGE, SERVICES, ClientConnection, caller
from commutator_openai.protocol.bounds import check_json
from commutator_openai.protocol.errors import HttpError, error_response
from commutator_openai.protocol.fields import build_request_converter

__all__ = [
    "BODY_LIMITS",
    "NOT_SERVED",
    "BodyLimits",
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
# Bodies of the largest size that are read and parsed at the same time; others wait.
_BODIES = 8
_MAX_WAITING = 256


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


@frozen(kw_only=True)
class BodyLimits:
    """Limits of the bodies of one front-door process."""

    max_bytes: int
    """Of one body."""
    timeout_s: float
    """For a body to arrive."""
    budget: ByteBudget = field(init=False)
    """Of the bodies that are being read or parsed, small ones apart."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "budget", ByteBudget(_BODIES * self.max_bytes, _MAX_WAITING))


BODY_LIMITS: web.AppKey[BodyLimits] = web.AppKey("body_limits", BodyLimits)


async def read_request(request: web.Request, cls: type[T]) -> T:
    """The body as ``cls``. Raises RequestError, HttpError for 408, 413 and 415, OverloadedError."""
    async with _room_for_body(request):
        body = await _read(request)
        try:
            return await off_loop(request, len(body), partial(_parse_quickly, body, cls))
        except _WrongSomewhereError:
            size = max(len(body), _INLINE_BYTES + 1)  # finding every mistake takes much longer
            return await off_loop(request, size, partial(parse_body, body, cls))


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as an unchecked JSON object. Raises as ``read_request`` does."""
    async with _room_for_body(request):
        body = await _read(request)
        return await off_loop(request, len(body), partial(parse_object, body))


async def off_loop(request: web.Request, size: int, work: Callable[[], T]) -> T:
    """``work`` on ``size`` bytes, in a thread if it takes long. Raises OverloadedError."""
    return work() if size <= _INLINE_BYTES else await request.app[SERVICES].work.run(work)


def _room_for_body(request: web.Request) -> AbstractAsyncContextManager[None]:
    """Inside, the body may be read: what the headers say of it is within the limits.

    A large body holds its share of the budget.
    """
    # Browsers send text/plain, and bodies without a type, to any site without asking. Requiring
    # JSON keeps such pages out.
    if not _is_json(request.content_type):
        given = request.content_type[:100] if "Content-Type" in request.headers else "none"
        raise HttpError(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Type: application/json, got {given}",
            "unsupported_media_type",
        )
    coding = _coding(request)
    limits, length = request.app[BODY_LIMITS], request.content_length
    if length is not None and length > limits.max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_size=limits.max_bytes, actual_size=length)
    limiter = request[EXCHANGE].services.limiter
    if limiter.is_full:
        limiter.check(caller(request, user=None, session_id=None))
    if length is None or coding is not None:
        length = limits.max_bytes
    return _SMALL if length <= _INLINE_BYTES else limits.budget.hold(length)


_SMALL: AbstractAsyncContextManager[None] = nullcontext()


async def _read(request: web.Request) -> bytes:
    """The whole body, which its exchange gets, too."""
    body = request[EXCHANGE].body = await _read_in_time(request)
    return body


async def _read_in_time(request: web.Request) -> bytes:
    if request.content.is_eof():
        return await _read_to_end(request)
    connection = request.protocol
    if isinstance(connection, ClientConnection):
        connection.waits_for_client()
    timeout_s = request.app[BODY_LIMITS].timeout_s
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await _read_to_end(request)
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"the body did not arrive within {timeout_s:g} s"
        raise HttpError(web.HTTPRequestTimeout.status_code, text, "body_too_slow") from None
    finally:
        if isinstance(connection, ClientConnection):
            connection.works_for_client()


async def _read_to_end(request: web.Request) -> bytes:
    try:
        coding = _coding(request)
        return await (request.read() if coding is None else _read_compressed(request, coding))
    except (HttpProcessingError, web.RequestPayloadError, InflateError) as error:
        text = f"the body cannot be read: {_reason(error)}"
        raise RequestError(text, code="invalid_body") from error


def _coding(request: web.Request) -> str | None:
    """How the body is compressed; None if it is not. Raises HttpError for what is unknown here.

    The connection's parser unpacks nothing: a few kilobytes may become as much as anybody wants,
    and a body that is refused for another reason is never looked at.
    """
    given = ",".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if given in {"", "identity"}:
        return None
    if given not in CODINGS:
        raise HttpError(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Encoding: {', '.join(CODINGS)} or none, got {given[:100]}",
            "unsupported_content_encoding",
            headers={"Accept-Encoding": ", ".join(CODINGS)},
        )
    return given


async def _read_compressed(request: web.Request, coding: str) -> bytes:
    """As ``request.read``, unpacked in small steps with other requests between them."""
    if request._read_bytes is None:  # noqa: SLF001 - filled here, and read by ``request.read``
        inflater = Inflater(coding, request.app[BODY_LIMITS].max_bytes)
        try:
            while data := await request.content.readany():
                for _ in inflater.pieces(data):
                    await asyncio.sleep(0)
            request._read_bytes = inflater.end()  # noqa: SLF001
        except (InflateError, web.HTTPRequestEntityTooLarge):
            # The rest is not read either.
            request.content.set_exception(web.RequestPayloadError("refused"))
            raise
    return await request.read()


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


class _WrongSomewhereError(Exception):
    """The fast converter refused a body."""


def parse_body(body: bytes, cls: type[T]) -> T:
    """``body`` as ``cls``. Raises RequestError: ``param`` is the first field that is wrong."""
    try:
        return _parse_quickly(body, cls)
    except _WrongSomewhereError:
        return _parse_thoroughly(parse_object(body), cls)


def _parse_quickly(body: bytes, cls: type[T]) -> T:
    data = parse_object(body)
    try:
        return _fast.structure(data, cls)
    except Exception as error:
        raise _WrongSomewhereError from error


def parse_object(body: bytes) -> dict[str, Any]:
    """``body`` as a JSON object. Raises RequestError."""
    try:
        check_json(body)
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


_ELSEWHERE = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Where the keys belong that people send to the wrong path."""


def _line(path: str, text: str) -> str:
    if text.startswith("unknown key;") and path in _ELSEWHERE:
        text = f"unknown key; requests with it go to {_ELSEWHERE[path]}"
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
