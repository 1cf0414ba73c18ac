"""What connectors to HTTP engines share: failures by their kind, answers passed on as they came."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
import msgspec

from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)

__all__ = [
    "HttpAnswer",
    "connection_error",
    "error_for",
    "errors_told",
    "host_for_us",
    "is_alive",
    "new_session",
    "own_answer",
    "post_forwarded",
]

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
# These servers close a connection that was idle for 5 s; one that we close earlier is never sent
# a request while the server lets go of it.
_KEEP_ALIVE_S = 3.0
_CONNECT_S = 5.0
# Full or dead is for routing to know; every other answer is the client's.
_TOLD_APART = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared with, not bound


class HttpAnswer:
    """A server's own answer to a client's own request: a ``ForwardedAnswer``.

    ``where`` names the server in errors, such as "vLLM at http://10.0.0.7:8000".
    """

    def __init__(self, response: aiohttp.ClientResponse, where: str) -> None:
        self._response = response
        self._where = where
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")

    async def chunks(self) -> AsyncIterator[bytes]:
        """As they come. Raises EngineUnavailableError."""
        content = self._response.content
        while True:
            with errors_told(self._where):  # those of whoever gets the data are not the server's
                data = await content.readany()
            if not data:
                return
            yield data


@contextmanager
def errors_told(where: str) -> Iterator[None]:
    """A connection that fails is told as EngineUnavailableError."""
    try:
        yield
    except aiohttp.ClientError as error:
        raise connection_error(where, error) from error


def connection_error(where: str, error: aiohttp.ClientError | OSError) -> EngineUnavailableError:
    """What became of a connection, in words for whoever runs the server."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        known = cause.errno in errno.errorcode
        what = os.strerror(cause.errno) if known and cause.errno else str(cause.strerror or cause)
        return EngineUnavailableError(f"{where} cannot be reached: {what}")
    if isinstance(error, TimeoutError):
        return EngineUnavailableError(f"{where}: no answer")
    what = str(error) or type(error).__name__
    return EngineUnavailableError(f"{where}: connection lost ({what})")


async def error_for(
    session: aiohttp.ClientSession,
    where: str,
    url: str,
    status: int,
    message: str,
    *,
    alive_path: str = "/health",
) -> Exception:
    """Tells a server that is full from one that is dead, and both from a wrong request.

    ``alive_path`` is what a server that lives answers at once.
    """
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return EngineOverloadedError(message)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return EngineError(f"{where} refuses us ({status}): {message}")
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(message)
    if not await is_alive(session, url, alive_path):
        return EngineUnavailableError(f"{where} is dead: {message}")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineOverloadedError(message)
    return EngineError(f"{where} answers {status}: {message}")


async def is_alive(session: aiohttp.ClientSession, url: str, path: str = "/health") -> bool:
    """Whether the server's answer at ``path`` says that it is well."""
    try:
        async with session.get(url + path, timeout=_HEALTH_TIMEOUT) as answer:
            return answer.status == HTTPStatus.OK
    except (aiohttp.ClientError, OSError):
        return False


def new_session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Connections to one server: any number, each kept while it is used."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers=headers,
        json_serialize=lambda value: msgspec.json.encode(value).decode(),
    )


async def post_forwarded(
    session: aiohttp.ClientSession, where: str, url: str, body: bytes, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """Send a client's own request. Raises EngineUnavailableError."""
    sent = {"Content-Type": "application/json", **headers}
    with errors_told(where):
        return await session.post(url, data=body, headers=sent)


@asynccontextmanager
async def own_answer(
    session: aiohttp.ClientSession,
    response: aiohttp.ClientResponse,
    where: str,
    url: str,
    message_of: Callable[[bytes], str],
    *,
    alive_path: str = "/health",
) -> AsyncIterator[HttpAnswer]:
    """The answer to ``post_forwarded`` of the server at ``url``; closed at the end.

    Raises EngineOverloadedError and EngineUnavailableError for a server that is full or dead, whose
    words ``message_of`` reads.
    """
    async with response:
        if response.status in _TOLD_APART:
            text = message_of(await response.read())
            raise await error_for(session, where, url, response.status, text, alive_path=alive_path)
        yield HttpAnswer(response, where)


def host_for_us(host: str, url: str) -> str:
    """Where a server that says it listens at ``host`` is reached.

    One that listens at every address is reached at that of ``url``.
    """
    if host not in _WILDCARDS:
        return host
    name = urlsplit(url).hostname or "127.0.0.1"
    return f"[{name}]" if ":" in name else name
