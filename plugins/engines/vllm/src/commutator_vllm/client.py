"""The client of one vLLM server, over the HTTP that it speaks."""

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
from commutator.engine.http import connection_error, new_session, own_answer, post_forwarded
from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError
from commutator.types import EngineInfo, EngineLoad, EventSource, GenerateRequest
from commutator_vllm.api import KvEventSource, ModelList, Version
from commutator_vllm.bodies import COMPLETIONS, GENERATE, hands_over, request_body
from commutator_vllm.discovery import engine_info, event_source
from commutator_vllm.exchange import NotOfferedError, generate, message_of, name_of
from commutator_vllm.metrics import CacheFacts, cache_facts, engine_load

__all__ = ["VllmClient"]

T = TypeVar("T")


class VllmClient(EngineClient):
    """Talks to the server at ``url``, http://HOST:PORT."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        use_priority: bool = True,
        kv_events: EventSource | None = None,
        hands_over: bool = False,
        answer_timeout_s: float = 10.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._use_priority = use_priority
        self._given_events = kv_events
        self._hands_over = hands_over
        self._answer_timeout_s = answer_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._facts: CacheFacts | None = None
        self.path = GENERATE
        """For requests; the other one once a request has shown that the server lacks this."""
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        if self._info is not None:  # routing asks before each request
            return self._info
        version = await self._read("/version", Version)
        models = await self._read("/v1/models", ModelList)
        facts = cache_facts(await self._get("/metrics"))
        if facts is None:
            raise EngineUnavailableError(
                f"{self.url}/metrics tells nothing of the KV cache: the server is still starting, "
                "or runs with --disable-log-stats, which must go"
            )
        events = event_source(await self._event_sources(), self.url, self._given_events)
        self._facts = facts
        self._info = engine_info(
            version.version, models, facts, events, hands_over=self._hands_over
        )
        return self._info

    def generate(self, request: GenerateRequest) -> DeltaStream:
        def abort() -> None:
            if task is not None:
                task.cancel()

        task: asyncio.Task[None] | None = None
        stream = DeltaStream(abort)
        if self._info is None:
            stream.fail(EngineUnavailableError(f"vLLM at {self.url}: not connected"))
            return stream
        task = asyncio.get_running_loop().create_task(self._run(request, stream, self._info.model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return stream

    async def _run(self, request: GenerateRequest, stream: DeltaStream, model: str) -> None:
        """Fill the stream to its end. Cancelling closes the connection, and vLLM aborts."""
        try:
            try:
                await self._generate(request, stream, model)
            except NotOfferedError:
                self.path = COMPLETIONS
                await self._generate(request, stream, model)
        except EngineUnavailableError as error:
            self._info = None  # it may be another server that comes back
            stream.fail(error)
        except Exception as error:  # noqa: BLE001 - whoever reads the stream gets it
            decodes = request.handover is not None and not hands_over(request.handover)
            # A healthy server that fails a decode leg did not get the KV.
            failed_load = decodes and type(error) is EngineError
            stream.fail(EngineHandoverError(str(error)) if failed_load else error)
        except asyncio.CancelledError:
            # Whoever closed only this stream does not hear of it.
            stream.fail(EngineUnavailableError(f"vLLM at {self.url}: the connection was closed"))
            raise

    async def _generate(self, request: GenerateRequest, stream: DeltaStream, model: str) -> None:
        body = request_body(self.path, request, model, use_priority=self._use_priority)
        await generate(self._open_session(), self.url, self.path, body, request, stream)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[ForwardedAnswer]:
        session, where = self._open_session(), name_of(self.url)
        try:
            response = await post_forwarded(session, where, self.url + path, body, headers)
        except EngineUnavailableError:
            self._info = None
            raise
        async with own_answer(session, response, where, self.url, message_of) as answer:
            yield answer

    async def load(self) -> EngineLoad:
        page = await self._get("/metrics")
        if self._facts is None and (facts := cache_facts(page)) is not None:
            self._facts = facts
        if self._facts is None:
            raise EngineUnavailableError(f"vLLM at {self.url}: not started yet")
        return engine_load(page, self._facts)

    async def check_health(self) -> None:
        await self._get("/health")

    async def close(self) -> None:
        running, self._info = list(self._running), None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session(self._headers)
        return self._session

    async def _event_sources(self) -> dict[str, KvEventSource]:
        """Older versions do not tell."""
        try:
            return await self._read("/kv_event_sources", dict[str, KvEventSource])
        except EngineUnavailableError:
            raise
        except EngineError:
            return {}

    async def _read(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(await self._get(path), type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}{path} is no answer of vLLM's: {error}") from error

    async def _get(self, path: str) -> str:
        status, text = await self._ask(path)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._info = None
            raise EngineUnavailableError(f"{self.url}{path} answers {status}")
        if status != HTTPStatus.OK:
            raise EngineError(f"{self.url}{path} answers {status}: {text[:200]}")
        return text

    async def _ask(self, path: str) -> tuple[int, str]:
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                session = self._open_session()
                async with session.get(self.url + path) as response:
                    return response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            self._info = None
            raise connection_error(name_of(self.url), error) from error
