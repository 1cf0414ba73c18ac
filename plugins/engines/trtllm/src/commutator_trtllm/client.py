"""The client of one TensorRT-LLM server.

It sends requests to the server, and asks its sidecar for information and load.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from attrs import frozen

from commutator import EngineInfo, EngineLoad, GenerateRequest
from commutator.engine import DeltaStream
from commutator.errors import (
    EngineHandoverError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
)
from commutator_engine_kit.completions import request_headers
from commutator_engine_kit.http import FailedAnswerError, HttpAnswer, HttpEngineClient, HttpServer
from commutator_trtllm.messages import (
    COMPLETIONS,
    DeltaReader,
    check_forwarded,
    hands_over,
    request_body,
)

INFO = "/info"
"""A sidecar answers a ``SidecarInfo``; 503 and an error message while the server is not ready."""
LOAD = "/load"
"""A sidecar answers an ``EngineLoad``."""


@frozen
class SidecarInfo:
    """The address and description of a server, for a client that talks to it directly."""

    url: str
    info: EngineInfo


class TrtllmClient(HttpEngineClient):
    """Talks to the server whose sidecar is at ``address``, http://HOST:PORT."""

    def __init__(self, address: str, *, answer_timeout_s: float = 10.0) -> None:
        self.address = address
        self._sidecar = HttpServer("TensorRT-LLM", address, answer_timeout_s=answer_timeout_s)
        super().__init__(self._sidecar)

    async def discover(self) -> EngineInfo:
        found = await self._sidecar.read(INFO, SidecarInfo)
        if found.url != self.server.url:
            self.server = HttpServer("TensorRT-LLM", found.url)
        return found.info

    async def answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        reader = DeltaReader()
        try:
            try:
                body, headers = request_body(request, model), request_headers(request)
                await reader.fill(stream, self.server, COMPLETIONS, body, headers)
            except FailedAnswerError as failed:
                raise await self.server.error_for(failed.status, str(failed)) from failed
        except Exception as error:
            if not reader.began and await self._lacks_kv(request, error):
                raise EngineHandoverError(str(error)) from error
            raise

    async def _lacks_kv(self, request: GenerateRequest, error: Exception) -> bool:
        """Whether a decode request failed because its KV did not arrive.

        A healthy server answers 400 then, as for any other error, or ends the stream. The request
        itself is valid, since the context server accepted it.
        """
        if request.handover is None or hands_over(request.handover):
            return False
        if isinstance(error, EngineUnavailableError | EngineIncompleteError):
            return await self.server.is_alive()
        return not isinstance(error, EngineOverloadedError)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        """As of its base. Raises RequestError for a ``cache_salt``, which the server ignores."""
        check_forwarded(body)
        async with super().forward(path, body, headers) as answer:
            yield answer

    async def load(self) -> EngineLoad:
        with self.forgets_a_lost_server():
            return await self._sidecar.read(LOAD, EngineLoad)

    async def check_health(self) -> None:
        """Check the server itself. While the sidecar has no server, raise the sidecar's error."""
        await self.start()
        await super().check_health()

    async def close(self) -> None:
        await super().close()
        await self._sidecar.close()
