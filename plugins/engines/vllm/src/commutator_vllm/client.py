"""The clients of one vLLM server: by HTTP, or by the token API that it serves beside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Unpack
from urllib.parse import parse_qs, urlsplit

import msgspec
from attrs import evolve, frozen

from commutator import (
    EngineInfo,
    EngineLoad,
    EventSource,
    FinishReason,
    GenerateRequest,
    Operation,
    Pooling,
    TokenDelta,
    WorkerRecord,
)
from commutator.engine import DeltaStream, TokenApiClient
from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError
from commutator_engine_kit.completions import ModelList, Version
from commutator_engine_kit.http import (
    FORWARDED_PATHS,
    RELAY_MODULE,
    FailedAnswerError,
    HttpAnswer,
    HttpEngineClient,
    HttpServer,
)
from commutator_engine_kit.launching import HttpRelay, ServerAccess, api_key_at
from commutator_vllm.discovery import (
    NO_CACHE,
    CacheFacts,
    KvEventSource,
    ServedPaths,
    cache_facts,
    engine_info,
    engine_load,
    event_source,
    operations_of,
)
from commutator_vllm.handover import handover_info
from commutator_vllm.messages import (
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    Classes,
    DeltaReader,
    Embeddings,
    check_forwarded,
    hands_over,
    needs_completions,
    pooling_body,
    request_body,
    request_headers,
)

_ADAPTERS = "/v1/load_lora_adapter"
PATHS = HttpRelay(
    module=RELAY_MODULE,
    read_paths=(
        *("/health", "/kv_event_sources", "/metrics", "/openapi.json", "/v1/models", "/version"),
    ),
    request_paths=(_ADAPTERS, CLASSIFY, GENERATE, *FORWARDED_PATHS),
)
"""What the client, and those of front doors on other hosts, ask a server for."""

_NOT_OFFERED = (HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED)
_NO_ROUTE = HTTPStatus.NOT_FOUND.phrase
"""vLLM's message for an unknown path; for an unknown model it is longer."""


class VllmClient(HttpEngineClient):
    """Talks to the server at ``url``, http://HOST:PORT."""

    adapters_path = _ADAPTERS

    def __init__(
        self,
        url: str,
        *,
        use_priority: bool = True,
        kv_events: EventSource | None = None,
        hands_over: bool = False,
        llguidance: bool = False,
        **access: Unpack[ServerAccess],
    ) -> None:
        """``llguidance``: the server enforces what answers follow with this library."""
        super().__init__(HttpServer("vLLM", url, **access))
        self._use_priority = use_priority
        self._given_events = kv_events
        self._hands_over = hands_over
        self._llguidance = llguidance
        self._operations: tuple[str, ...] = (Operation.GENERATE,)
        self.path = GENERATE
        """Where requests are sent; COMPLETIONS once the server has answered that it lacks this."""

    async def discover(self) -> EngineInfo:
        version = await self.server.read("/version", Version)
        models = await self.server.read("/v1/models", ModelList)
        self._operations = operations_of(await self._served_paths())
        facts = self._facts(await self._metrics())
        if facts is None:
            raise EngineUnavailableError(
                f"{self.server.url}/metrics has no vllm:cache_config_info: the server is still "
                "starting, or runs with --disable-log-stats; remove that argument"
            )
        events = event_source(await self._event_sources(), self.server.url, self._given_events)
        info = engine_info(version.version, models, facts, events, hands_over=self._hands_over)
        return evolve(info, operations=self._operations)

    def _facts(self, page: str) -> CacheFacts | None:
        """None: the server is still starting. Encoders in pooling mode have no KV cache."""
        facts = cache_facts(page)
        generates = Operation.GENERATE in self._operations
        return NO_CACHE if facts is None and not generates else facts

    async def _pool(
        self, request: GenerateRequest, pooling: Pooling, model: str, stream: DeltaStream
    ) -> None:
        classifies = pooling.operation == Operation.CLASSIFY
        path = CLASSIFY if classifies else EMBEDDINGS
        said: type[Classes | Embeddings] = Classes if classifies else Embeddings
        body = pooling_body(request, pooling, model, use_priority=self._use_priority)
        try:
            answer = await self.server.post(path, body, request_headers(request))
        except FailedAnswerError as failed:
            raise await self.server.error_for(failed.status, str(failed)) from failed
        async with answer:
            data = await answer.read()
        try:
            vectors = msgspec.json.decode(data, type=said).vectors
        except msgspec.MsgspecError as error:
            text = f"{self.server.where} sent no answer of {path}: {error}"
            raise EngineError(text) from error
        stream.feed(TokenDelta(finish_reason=FinishReason.STOP, vectors=vectors))

    async def answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        if request.pooling is not None:
            await self._pool(request, request.pooling, model, stream)
            return
        try:
            await self._answer(request, model, stream)
        except EngineError as error:
            decodes = request.handover is not None and not hands_over(request.handover)
            if decodes and type(error) is EngineError:
                # A healthy server that fails a decode request did not get the KV.
                raise EngineHandoverError(str(error)) from error
            raise

    async def _answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        path = COMPLETIONS if needs_completions(request) else self.path
        body = request_body(
            path,
            request,
            model,
            use_priority=self._use_priority,
            llguidance=self._llguidance,
        )
        reader = DeltaReader(request)
        try:
            await reader.fill(stream, self.server, path, body, request_headers(request))
        except FailedAnswerError as failed:
            if path == GENERATE and _is_not_offered(failed):
                self.path = COMPLETIONS
                await self._answer(request, model, stream)
            else:
                raise await self.server.error_for(failed.status, str(failed)) from failed

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        """As of its base. Raises RequestError for strict tools that would not be."""
        if self._llguidance:
            check_forwarded(body)
        async with super().forward(path, body, headers) as answer:
            yield answer

    async def load(self) -> EngineLoad:
        with self.forgets_a_lost_server():
            page = await self._metrics()
        facts = self._facts(page)
        if facts is None:
            raise EngineUnavailableError(f"{self.server.where} is still starting")
        return engine_load(page, facts)

    async def _metrics(self) -> str:
        return (await self.server.ask("/metrics")).decode()

    async def _served_paths(self) -> ServedPaths:
        """Empty for a server that does not list them."""
        try:
            return await self.server.read("/openapi.json", ServedPaths)
        except EngineUnavailableError:
            raise
        except EngineError:
            return ServedPaths()

    async def _event_sources(self) -> dict[str, KvEventSource]:
        """KV event publishers by rank; empty for versions without /kv_event_sources."""
        try:
            return await self.server.read("/kv_event_sources", dict[str, KvEventSource])
        except EngineUnavailableError:
            raise
        except EngineError:
            return {}


def _is_not_offered(error: FailedAnswerError) -> bool:
    return error.status in _NOT_OFFERED or str(error) == _NO_ROUTE


@frozen
class TokenApiAddress:
    """Where one server serves both; written ``URL?token_api=HOST:PORT``."""

    url: str
    """Of vLLM's own endpoints, or of their relay."""
    token_api: str
    """Of the token API, "host:port"."""

    def __str__(self) -> str:
        return f"{self.url}?token_api={self.token_api}"

    @classmethod
    def parse(cls, address: str) -> TokenApiAddress | None:
        """None for an address without a token API."""
        parts = urlsplit(address)
        found = parse_qs(parts.query).get("token_api")
        return cls(f"{parts.scheme}://{parts.netloc}", found[0]) if found else None


class VllmTokenClient(TokenApiClient):
    """Sends requests over the token API, and clients' own HTTP requests to vLLM's endpoints."""

    def __init__(
        self, address: TokenApiAddress, *, hands_over: bool = False, llguidance: bool = False
    ) -> None:
        super().__init__(address.token_api)
        self._llguidance = llguidance
        self._server = HttpServer(
            "vLLM", address.url, api_key=api_key_at(address.url), of_cluster=True
        )
        self._hands_over = hands_over

    def expect(self, record: WorkerRecord) -> None:
        super().expect(record)
        self._server.expect(record)

    async def start(self) -> EngineInfo:
        info = await super().start()
        if not self._hands_over:
            return info
        return evolve(info, handover=handover_info(info.model, info.version, info.block_size))

    def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[HttpAnswer]:
        if self._llguidance:
            check_forwarded(body)
        return self._server.forward(path, body, headers)

    async def close(self) -> None:
        await super().close()
        await self._server.close()
