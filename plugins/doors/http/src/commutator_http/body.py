"""Reads a request's body within its limits.

What the headers tell is checked before the first byte of the body is read: its type, its length,
and whether there is room for one more request.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from attrs import field, frozen

from commutator.contract.answer import Failure
from commutator.errors import RequestError
from commutator.frontend import ByteBudget, Call
from commutator_http.inflate import CODINGS, InflateError, Inflater

__all__ = ["BodyLimits", "ClientConnection", "read_body", "room_for_body"]

# Parsing this much takes a few milliseconds.
_INLINE_BYTES = 64 << 10
# Bodies of the largest size that are read and parsed at the same time; others wait.
_BODIES = 8
_MAX_WAITING = 256


class ClientConnection:
    """A connection that is told when it waits for its client; see ``commutator_http.server``."""

    __slots__ = ()

    def knows_client(self) -> None:
        """A request on it had a key that is known here."""

    def waits_for_client(self) -> None:
        """A part of the request is still to come, or the answer is not read.

        The connection may be closed for another one.
        """

    def works_for_client(self) -> None:
        """The request is complete, and what there is of an answer is read."""


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


def room_for_body(
    request: web.Request, call: Call, limits: BodyLimits
) -> AbstractAsyncContextManager[None]:
    """Inside, the body may be read: what the headers say of it is within the limits.

    A large body holds its share of the budget.
    """
    # Browsers send text/plain, and bodies without a type, to any site without asking. Requiring
    # JSON keeps such pages out.
    if not _is_json(request.content_type):
        given = request.content_type[:100] if "Content-Type" in request.headers else "none"
        raise Failure(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Type: application/json, got {given}",
            "unsupported_media_type",
        )
    coding = _coding(request)
    length = request.content_length
    if length is not None and length > limits.max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_size=limits.max_bytes, actual_size=length)
    limiter = call.services.limiter
    if limiter.is_full:
        limiter.check(call.caller())
    if length is None or coding is not None:
        length = limits.max_bytes
    return _SMALL if length <= _INLINE_BYTES else limits.budget.hold(length)


_SMALL: AbstractAsyncContextManager[None] = nullcontext()


async def read_body(request: web.Request, limits: BodyLimits) -> bytes:
    """The whole body, unpacked. Raises RequestError, Failure, HTTPRequestEntityTooLarge."""
    if request.content.is_eof():
        return await _read_to_end(request, limits)
    connection = request.protocol
    if isinstance(connection, ClientConnection):
        connection.waits_for_client()
    timeout_s = limits.timeout_s
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await _read_to_end(request, limits)
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"the body did not arrive within {timeout_s:g} s"
        raise Failure(web.HTTPRequestTimeout.status_code, text, "body_too_slow") from None
    finally:
        if isinstance(connection, ClientConnection):
            connection.works_for_client()


async def _read_to_end(request: web.Request, limits: BodyLimits) -> bytes:
    try:
        coding = _coding(request)
        return await (
            request.read()
            if coding is None
            else _read_compressed(request, coding, limits.max_bytes)
        )
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
        raise Failure(
            web.HTTPUnsupportedMediaType.status_code,
            f"expected Content-Encoding: {', '.join(CODINGS)} or none, got {given[:100]}",
            "unsupported_content_encoding",
            headers={"Accept-Encoding": ", ".join(CODINGS)},
        )
    return given


async def _read_compressed(request: web.Request, coding: str, max_bytes: int) -> bytes:
    """As ``request.read``, unpacked in small steps with other requests between them."""
    if request._read_bytes is None:  # noqa: SLF001 - filled here, and read by ``request.read``
        inflater = Inflater(coding, max_bytes)
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
