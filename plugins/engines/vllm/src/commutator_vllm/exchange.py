"""One generation over HTTP: the request out, its deltas into a stream, failures by their kind."""

from __future__ import annotations

from http import HTTPStatus

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
from commutator_vllm.bodies import hands_over, request_body, request_headers
from commutator_vllm.deltas import DeltaReader, FailedInStreamError

__all__ = ["Exchange"]

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
_OF_THE_REQUEST = range(400, 500)
_OF_THE_SERVER = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Exchange:
    """Cancelling ``run`` closes the connection, at which vLLM aborts the request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        path: str,
        request: GenerateRequest,
        model: str,
        *,
        use_priority: bool,
    ) -> None:
        self._session = session
        self._url = url
        self._request = request
        self._target = url + path
        self._body = request_body(path, request, model, use_priority=use_priority)

    async def run(self, stream: DeltaStream) -> None:
        """Fill ``stream`` to its end. Raises nothing."""
        try:
            await self._run(stream)
        except aiohttp.ClientError as error:
            stream.fail(EngineUnavailableError(f"vLLM at {self._url}: connection lost ({error})"))
        except FailedInStreamError as error:
            stream.fail(await self._told_apart(error.code or 500, str(error)))
        except Exception as error:  # noqa: BLE001 - whoever reads the stream gets it
            stream.fail(error)
        finally:
            # Closed, as well, when this was cancelled while nobody had closed the stream.
            stream.fail(EngineUnavailableError(f"vLLM at {self._url}: the connection was closed"))

    async def _run(self, stream: DeltaStream) -> None:
        request = self._request
        reader = DeltaReader(request.sampling.top_logprobs)
        async with self._session.post(
            self._target, json=self._body, headers=request_headers(request)
        ) as response:
            if response.status != HTTPStatus.OK:
                raise await self._told_apart(response.status, _message(await response.read()))
            if hands_over(request.handover):
                for delta in reader.whole(await response.read()):
                    stream.feed(delta)
            else:
                async for data in response.content.iter_any():
                    for delta in reader.feed(data):
                        stream.feed(delta)
        if not reader.ended:
            raise EngineIncompleteError(f"vLLM at {self._url} ended the stream before the answer")

    async def _told_apart(self, status: int, message: str) -> Exception:
        """The error for a status: full, dead, or wrong."""
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return EngineOverloadedError(message)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            if not await self._is_alive():
                return EngineUnavailableError(f"vLLM at {self._url} is dead: {message}")
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                return EngineOverloadedError(message)
        elif status in _OF_THE_REQUEST and status not in _OF_THE_SERVER:
            return RequestError(message)
        return EngineError(f"vLLM at {self._url} answers {status}: {message}")

    async def _is_alive(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health", timeout=_HEALTH_TIMEOUT) as answer:
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError):
            return False


def _message(body: bytes) -> str:
    try:
        failure = msgspec.json.decode(body, type=Chunk).error
    except msgspec.MsgspecError:
        failure = None
    return failure.message if failure is not None else body[:500].decode(errors="replace")
