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
from commutator_trtllm.api import Chunk
from commutator_trtllm.bodies import COMPLETIONS, request_headers
from commutator_trtllm.deltas import DeltaReader, FailedInStreamError, failure_of

__all__ = ["generate", "message_of", "name_of"]


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
    where = name_of(url)
    sent = session.post(url + COMPLETIONS, json=body, headers=request_headers(request))
    try:
        with errors_told(where):
            async with sent as response:
                if response.status != HTTPStatus.OK:
                    message = message_of(await response.read())
                    raise await error_for(session, where, url, response.status, message)
                if body["stream"]:
                    async for data in response.content.iter_any():
                        for delta in reader.feed(data):
                            stream.feed(delta)
                else:
                    for delta in reader.whole(await response.read()):
                        stream.feed(delta)
    except FailedInStreamError as error:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        raise await error_for(session, where, url, status, str(error)) from error
    if not reader.ended:
        raise EngineIncompleteError(f"{where} ended the stream before the answer")


def message_of(body: bytes) -> str:
    """What an error of the server's says."""
    try:
        failure = failure_of(msgspec.json.decode(body, type=Chunk))
    except msgspec.MsgspecError:
        failure = None
    return failure if failure is not None else body[:500].decode(errors="replace")


def name_of(url: str) -> str:
    """A server in errors."""
    return f"TensorRT-LLM at {url}"
