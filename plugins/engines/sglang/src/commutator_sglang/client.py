"""The client of one SGLang server, over the HTTP that it speaks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec
from attrs import frozen

from commutator import EngineClient, ForwardedAnswer
from commutator.engine import DeltaStream
from commutator.engine.http import connection_error, new_session, own_answer, post_forwarded
from commutator.errors import EngineError, EngineUnavailableError
from commutator.types import EngineInfo, EngineLoad, EventSource, GenerateRequest
from commutator_sglang.api import Loads, ModelInfo, ModelList, ServerInfo
from commutator_sglang.deltas import message_of
from commutator_sglang.discovery import engine_info, engine_load
from commutator_sglang.generation import ALIVE, Generation

__all__ = ["SglangClient"]

T = TypeVar("T")

_HEALTH_S = 30.0
"""It generates a token, which may have to wait for a long prompt, and gives up after 20 s."""


@frozen
class _Server:
    info: EngineInfo
    told: ServerInfo


class SglangClient(EngineClient):
    """Talks to the server at ``url``, http://HOST:PORT."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        kv_events: EventSource | None = None,
        answer_timeout_s: float = 10.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._where = f"SGLang at {self.url}"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._given_events = kv_events
        self._answer_timeout_s = answer_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._server: _Server | None = None
        self._running: dict[asyncio.Task[None], Generation] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        if self._server is None:  # routing asks before each request
            told = await self._read("/server_info", ServerInfo)
            model = await self._read("/model_info", ModelInfo)
            models = await self._read("/v1/models", ModelList)
            info = engine_info(self.url, told, model, models, self._given_events)
            self._server = _Server(info, told)
        return self._server.info

    def generate(self, request: GenerateRequest) -> DeltaStream:
        def abort() -> None:
            if task is not None:
                self._abort(task)

        task: asyncio.Task[None] | None = None
        stream = DeltaStream(abort)
        if self._server is None:
            stream.fail(EngineUnavailableError(f"{self._where}: not connected"))
            return stream
        request_id = f"{os.urandom(8).hex()}-{request.request_id}"
        generation = Generation(
            self._open_session(), self.url, self._server.told, request, request_id, stream
        )
        task = asyncio.get_running_loop().create_task(self._run(generation, stream))
        self._running[task] = generation
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return stream

    async def _run(self, generation: Generation, stream: DeltaStream) -> None:
        try:
            await generation.run()
        except EngineUnavailableError as error:
            self._server = None  # it may be another one that comes back
            stream.fail(error)
        except Exception as error:  # noqa: BLE001 - whoever reads the stream gets it
            stream.fail(error)
        finally:
            # If it has not ended, it was aborted: by closing it, which hears of nothing, or by us.
            stream.fail(EngineUnavailableError(f"{self._where}: the connection was closed"))

    def _abort(self, task: asyncio.Task[None]) -> None:
        if (generation := self._running.get(task)) is not None:
            aborting = asyncio.get_running_loop().create_task(generation.abort(task))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[ForwardedAnswer]:
        session, where = self._open_session(), self._where
        try:
            response = await post_forwarded(session, where, self.url + path, body, headers)
        except EngineUnavailableError:
            self._server = None
            raise
        async with own_answer(
            session, response, where, self.url, message_of, alive_path=ALIVE
        ) as answer:
            yield answer

    async def load(self) -> EngineLoad:
        info = await self.start()
        loads = await self._read("/v1/loads?include=core", Loads)
        return engine_load(loads, info.block_size, info.kv_capacity_blocks)

    async def check_health(self) -> None:
        await self._get("/health", _HEALTH_S)

    async def close(self) -> None:
        running, self._server = list(self._running), None
        for task in running:
            self._abort(task)
        await asyncio.gather(*running, *self._aborting, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session(self._headers)
        return self._session

    async def _read(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(await self._get(path, self._answer_timeout_s), type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}{path} is no answer of SGLang's: {error}") from error

    async def _get(self, path: str, timeout_s: float) -> str:
        status, text = await self._ask(path, timeout_s)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._server = None
            raise EngineUnavailableError(f"{self.url}{path} answers {status}")
        if status != HTTPStatus.OK:
            raise EngineError(f"{self.url}{path} answers {status}: {text[:200]}")
        return text

    async def _ask(self, path: str, timeout_s: float) -> tuple[int, str]:
        try:
            async with asyncio.timeout(timeout_s):
                session = self._open_session()
                async with session.get(self.url + path) as response:
                    return response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            self._server = None
            raise connection_error(self._where, error) from error
