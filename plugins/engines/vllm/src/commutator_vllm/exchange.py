"""One generation over HTTP: the request out, its deltas into a stream, failures by their kind."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from commutator.engine import DeltaStream
from commutator.engine.http import error_for, errors_told
from commutator.errors import EngineIncompleteError
from commutator.types import GenerateRequest
from commutator_vllm.api import Chunk
from commutator_vllm.bodies import GENERATE, request_headers
from commutator_vllm.deltas import DeltaReader, FailedInStreamError

__all__ = ["NotOfferedError", "failure", "generate", "message_of", "name_of"]

_NOT_OFFERED = (HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED)
_NO_ROUTE = HTTPStatus.NOT_FOUND.phrase
"""What vLLM says of a path that it does not know; of a model it says more."""


class NotOfferedError(Exception):
    """The server does not offer this endpoint."""


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
        with errors_told(name_of(url)):
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
        raise await failure(session, url, error.code or 500, str(error)) from error
    if not reader.ended:
        raise EngineIncompleteError(f"{name_of(url)} ended the stream before the answer")


async def _refusal(
    session: aiohttp.ClientSession, url: str, path: str, response: aiohttp.ClientResponse
) -> Exception:
    message = message_of(await response.read())
    if path == GENERATE and (response.status in _NOT_OFFERED or message == _NO_ROUTE):
        return NotOfferedError()
    return await failure(session, url, response.status, message)


async def failure(session: aiohttp.ClientSession, url: str, status: int, message: str) -> Exception:
    """The error for an answer of the server at ``url`` that is none."""
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        message = f"{message}; see `api_key`"
    return await error_for(session, name_of(url), url, status, message)


def name_of(url: str) -> str:
    """A server in errors."""
    return f"vLLM at {url}"


def message_of(body: bytes) -> str:
    """What an error of vLLM's says."""
    try:
        failure = msgspec.json.decode(body, type=Chunk).error
    except msgspec.MsgspecError:
        failure = None
    return failure.message if failure is not None else body[:500].decode(errors="replace")
