"""What connectors to HTTP engines share: failures by their kind, answers passed on as they came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import aiohttp

from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)

__all__ = ["HttpAnswer", "error_for", "errors_told", "is_alive"]

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)


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
        what = str(error) or type(error).__name__
        raise EngineUnavailableError(f"{where}: connection lost ({what})") from error


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
