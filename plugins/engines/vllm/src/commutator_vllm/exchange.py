"""One generation over HTTP: the request out, its deltas into a stream, failures by their kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from commutator.engine import DeltaStream
from commutator.errors import (
    EngineError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator.types import GenerateRequest
from commutator_vllm.api import Chunk
from commutator_vllm.bodies import GENERATE, request_headers
from commutator_vllm.deltas import DeltaReader, FailedInStreamError

__all__ = ["HttpAnswer", "NotOfferedError", "error_for", "errors_told", "generate", "message_of"]

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
_NOT_OFFERED = (HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED)
_NO_ROUTE = HTTPStatus.NOT_FOUND.phrase
"""What vLLM says of a path that it does not know; of a model it says more."""


class NotOfferedError(Exception):
    """The server does not offer this endpoint."""


class HttpAnswer:
    """The server's own answer to a client's own request."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response = response
        self._url = url
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")

    async def chunks(self) -> AsyncIterator[bytes]:
        """As they come. Raises EngineUnavailableError."""
        content = self._response.content
        while True:
            with errors_told(self._url):  # those of whoever gets the data are not the server's
                data = await content.readany()
            if not data:
                return
            yield data


@contextmanager
def errors_told(url: str) -> Iterator[None]:
    """A connection that fails is told as ours."""
    try:
        yield
    except aiohttp.ClientError as error:
        raise EngineUnavailableError(f"vLLM at {url}: connection lost ({error})") from error


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: Mapping[str, Any],
    request: GenerateRequest,
    stream: DeltaStream,
) -> None:
    """Fill ``stream`` with the deltas of one answer.

    Raises NotOfferedError, what ``TokenStream`` says, and EngineIncompleteError.
    """
    reader = DeltaReader(request.sampling.top_logprobs)
    sent = session.post(url + path, json=body, headers=request_headers(request))
    try:
        with errors_told(url):
            async with sent as response:
                if response.status != HTTPStatus.OK:
                    raise await _refusal(session, url, path, response)
                if body["stream"]:
                    async for data in response.content.iter_any():
                        for delta in reader.feed(data):
                            stream.feed(delta)
                else:
                    for delta in reader.whole(await response.read()):
                        stream.feed(delta)
    except FailedInStreamError as error:
        raise await error_for(session, url, error.code or 500, str(error)) from error
    if not reader.ended:
        raise EngineIncompleteError(f"vLLM at {url} ended the stream before the answer")


async def _refusal(
    session: aiohttp.ClientSession, url: str, path: str, response: aiohttp.ClientResponse
) -> Exception:
    message = message_of(await response.read())
    if path == GENERATE and (response.status in _NOT_OFFERED or message == _NO_ROUTE):
        return NotOfferedError()
    return await error_for(session, url, response.status, message)


async def error_for(
    session: aiohttp.ClientSession, url: str, status: int, message: str
) -> Exception:
    """Tells a server that is full from one that is dead, and both from a wrong request."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return EngineOverloadedError(message)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return EngineError(f"vLLM at {url} refuses us ({status}): {message}; see `api_key`")
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(message)
    if not await _is_alive(session, url):
        return EngineUnavailableError(f"vLLM at {url} is dead: {message}")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineOverloadedError(message)
    return EngineError(f"vLLM at {url} answers {status}: {message}")


async def _is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=_HEALTH_TIMEOUT) as answer:
            return answer.status == HTTPStatus.OK
    except (aiohttp.ClientError, OSError):
        return False


def message_of(body: bytes) -> str:
    """What an error of vLLM's says."""
    try:
        failure = msgspec.json.decode(body, type=Chunk).error
    except msgspec.MsgspecError:
        failure = None
    return failure.message if failure is not None else body[:500].decode(errors="replace")
