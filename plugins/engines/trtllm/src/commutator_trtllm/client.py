"""The client of one TensorRT-LLM server: requests go to it, questions to its sidecar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from commutator import EngineClient, ForwardedAnswer
from commutator.engine import DeltaStream
from commutator.engine.http import (
    connection_error,
    is_alive,
    new_session,
    own_answer,
    post_forwarded,
)
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
)
from commutator.types import EngineInfo, EngineLoad, GenerateRequest
from commutator_trtllm.bodies import hands_over, request_body
from commutator_trtllm.deltas import DeltaReader
from commutator_trtllm.exchange import generate, message_of, name_of
from commutator_trtllm.told import INFO, LOAD, Told

__all__ = ["TrtllmClient"]

T = TypeVar("T")


class TrtllmClient(EngineClient):
    """Talks to the server whose sidecar is at ``address``, http://HOST:PORT."""

    def __init__(self, address: str, *, answer_timeout_s: float = 10.0) -> None:
        self.address = address
        self._answer_timeout_s = answer_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._told: Told | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        if self._told is None:  # routing asks before each request
            self._told = await self._read(INFO, Told)
        return self._told.info

    def generate(self, request: GenerateRequest) -> DeltaStream:
        def abort() -> None:
            if task is not None:
                task.cancel()

        task: asyncio.Task[None] | None = None
        stream = DeltaStream(abort)
        if self._told is None:
            stream.fail(EngineUnavailableError(f"{name_of(self.address)}: not connected"))
            return stream
        task = asyncio.get_running_loop().create_task(self._run(request, stream, self._told))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return stream

    async def _run(self, request: GenerateRequest, stream: DeltaStream, told: Told) -> None:
        """Fill the stream to its end. Cancelling closes the connection, and the server aborts."""
        reader = DeltaReader()
        try:
            body = request_body(request, told.info.model)
            await generate(self._open_session(), told.url, body, request, reader, stream)
        except Exception as error:  # noqa: BLE001 - whoever reads the stream gets it
            if not reader.began and await self._lacks_kv(request, error, told.url):
                stream.fail(EngineHandoverError(str(error)))
                return
            if isinstance(error, EngineUnavailableError):
                self._told = None  # it may be another server that comes back
            stream.fail(error)
        except asyncio.CancelledError:
            # Whoever closed only this stream does not hear of it.
            stream.fail(EngineUnavailableError(f"{name_of(told.url)}: the connection was closed"))
            raise

    async def _lacks_kv(self, request: GenerateRequest, error: Exception, url: str) -> bool:
        """Whether a decode leg failed because its KV did not arrive.

        A server that is well says 400 of that as of anything else, or just breaks the stream off;
        the request itself was taken by the context server before.
        """
        if request.handover is None or hands_over(request.handover):
            return False
        if isinstance(error, EngineUnavailableError | EngineIncompleteError):
            return await is_alive(self._open_session(), url)
        return not isinstance(error, EngineOverloadedError)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[ForwardedAnswer]:
        if self._told is None:
            raise EngineUnavailableError(f"{name_of(self.address)}: not connected")
        session, url = self._open_session(), self._told.url
        where = name_of(url)
        try:
            response = await post_forwarded(session, where, url + path, body, headers)
        except EngineUnavailableError:
            self._told = None
            raise
        async with own_answer(session, response, where, url, message_of) as answer:
            yield answer

    async def load(self) -> EngineLoad:
        return await self._read(LOAD, EngineLoad)

    async def check_health(self) -> None:
        """The server's own health; of a sidecar without a server, what it says."""
        await self.start()
        assert self._told is not None
        await self._get(f"{self._told.url}/health")

    async def close(self) -> None:
        running, self._told = list(self._running), None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session()
        return self._session

    async def _read(self, path: str, kind: type[T]) -> T:
        url = self.address + path
        try:
            return msgspec.json.decode(await self._get(url), type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{url} is no answer of a sidecar's: {error}") from error

    async def _get(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                async with self._open_session().get(url) as response:
                    status, body = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self._told = None
            raise connection_error(url, error) from error
        if status != HTTPStatus.OK:
            self._told = None
            raise EngineUnavailableError(message_of(body) or f"{url} answers {status}")
        return body
