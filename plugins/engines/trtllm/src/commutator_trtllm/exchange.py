"""One exchange with a server over HTTP: deltas into a stream, failures by their kind."""

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
from commutator_trtllm.api import Chunk
from commutator_trtllm.bodies import COMPLETIONS, request_headers
from commutator_trtllm.deltas import DeltaReader, FailedInStreamError, failure_of

__all__ = ["HttpAnswer", "error_for", "errors_told", "generate", "is_alive", "message_of"]

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)


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
        raise EngineUnavailableError(
            f"TensorRT-LLM at {url}: connection lost ({str(error) or type(error).__name__})"
        ) from error


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    request: GenerateRequest,
    reader: DeltaReader,
    stream: DeltaStream,
) -> None:
    """Fill ``stream`` with the deltas of one answer.

    Raises what ``TokenStream`` says, and EngineIncompleteError.
    """
    sent = session.post(url + COMPLETIONS, json=body, headers=request_headers(request))
    try:
        with errors_told(url):
            async with sent as response:
                if response.status != HTTPStatus.OK:
                    message = message_of(await response.read())
                    raise await error_for(session, url, response.status, message)
                if body["stream"]:
                    async for data in response.content.iter_any():
                        for delta in reader.feed(data):
                            stream.feed(delta)
                else:
                    for delta in reader.whole(await response.read()):
                        stream.feed(delta)
    except FailedInStreamError as error:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        raise await error_for(session, url, status, str(error)) from error
    if not reader.ended:
        raise EngineIncompleteError(f"TensorRT-LLM at {url} ended the stream before the answer")


async def error_for(
    session: aiohttp.ClientSession, url: str, status: int, message: str
) -> Exception:
    """Tells a server that is full from one that is dead, and both from a wrong request."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return EngineOverloadedError(message)
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(message)
    if not await is_alive(session, url):
        return EngineUnavailableError(f"TensorRT-LLM at {url} is dead: {message}")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineOverloadedError(message)
    return EngineError(f"TensorRT-LLM at {url} answers {status}: {message}")


async def is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the server says that it is well."""
    try:
        async with session.get(f"{url}/health", timeout=_HEALTH_TIMEOUT) as answer:
            return answer.status == HTTPStatus.OK
    except (aiohttp.ClientError, OSError):
        return False


def message_of(body: bytes) -> str:
    """What an error of the server's says."""
    try:
        failure = failure_of(msgspec.json.decode(body, type=Chunk))
    except msgspec.MsgspecError:
        failure = None
    return failure if failure is not None else body[:500].decode(errors="replace")
