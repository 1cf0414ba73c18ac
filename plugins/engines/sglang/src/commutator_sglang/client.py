"""The HTTP client of one SGLang server."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Unpack

import msgspec

from commutator import (
    EngineInfo,
    EngineLoad,
    EventSource,
    FinishReason,
    GenerateRequest,
    Pooling,
    TokenDelta,
)
from commutator.engine import DeltaStream
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineIncompleteError,
    EngineNeedsPrefillError,
)
from commutator_engine_kit.completions import ModelList
from commutator_engine_kit.http import (
    FORWARDED_PATHS,
    RELAY_MODULE,
    FailedAnswerError,
    HttpEngineClient,
    HttpServer,
)
from commutator_engine_kit.launching import HttpRelay, ServerAccess
from commutator_sglang.discovery import UNIX_SOCKET, engine_info, engine_load, private_event_source
from commutator_sglang.handover import ANSWER_WITHIN_S
from commutator_sglang.messages import (
    ABORT,
    EMBEDDINGS,
    GENERATE,
    DeltaReader,
    Embeddings,
    Loads,
    ModelInfo,
    ServerInfo,
    embeddings_body,
    request_body,
)

log = logging.getLogger(__name__)

_ADAPTERS = "/load_lora_adapter"
PATHS = HttpRelay(
    module=RELAY_MODULE,
    read_paths=("/health", "/model_info", "/server_info", "/v1/loads", "/v1/models"),
    request_paths=(ABORT, _ADAPTERS, GENERATE, *FORWARDED_PATHS),
)
"""What the client, and those of front doors on other hosts, ask a server for."""
_ALIVE = "/model_info"
"""Shows that a server is alive. /health takes a second or more, because it generates a token."""
_HEALTH_S = 30.0
"""That token may wait for a long prompt; SGLang gives up after 20 s."""
_ABORT_WITHIN_S = 2.0
_ABORT_AGAIN_S = 0.2
"""SGLang ignores the abort of a request that it has not started yet, so aborts are repeated."""


class SglangClient(HttpEngineClient):
    """Talks to the server at ``url``, http://HOST:PORT."""

    adapters_path = _ADAPTERS

    def __init__(
        self, url: str, *, kv_events: EventSource | None = None, **access: Unpack[ServerAccess]
    ) -> None:
        super().__init__(HttpServer("SGLang", url, alive_path=_ALIVE, **access))
        self._given_events = kv_events
        self._server_info: ServerInfo | None = None

    async def discover(self) -> EngineInfo:
        server = await self.server.read("/server_info", ServerInfo)
        model = await self.server.read("/model_info", ModelInfo)
        models = await self.server.read("/v1/models", ModelList)
        self._server_info = server
        events = self._given_events or _private_events_here(server)
        return engine_info(self.server.url, server, model, models, events)

    async def _embed(
        self, request: GenerateRequest, pooling: Pooling, model: str, stream: DeltaStream
    ) -> None:
        try:
            answer = await self.server.post(EMBEDDINGS, embeddings_body(request, pooling, model))
        except FailedAnswerError as failed:
            raise await self.server.error_for(failed.status, str(failed)) from failed
        async with answer:
            data = await answer.read()
        try:
            vectors = msgspec.json.decode(data, type=Embeddings).vectors
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.server.where} sent no embeddings: {error}") from error
        stream.feed(TokenDelta(finish_reason=FinishReason.STOP, vectors=vectors))

    async def answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        if request.pooling is not None:
            await self._embed(request, request.pooling, model, stream)
            return
        assert self._server_info is not None, "start comes first"
        generation = _Generation(self.server, self._server_info, request, stream)
        running = asyncio.create_task(generation.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await generation.abort(running)
            raise

    async def load(self) -> EngineLoad:
        info = await self.start()
        with self.forgets_a_lost_server():
            loads = await self.server.read("/v1/loads?include=core", Loads)
        return engine_load(loads, info.block_size, info.kv_capacity_blocks)

    async def check_health(self) -> None:
        with self.forgets_a_lost_server():
            await self.server.ask("/health", timeout_s=_HEALTH_S)


def _private_events_here(server: ServerInfo) -> EventSource | None:
    """The server's Unix sockets for KV events, if they are on this machine."""
    source = private_event_source(server)
    if source is None or not Path(source.endpoint.removeprefix(UNIX_SOCKET)).is_socket():
        return None
    return source


class _Generation:
    """One request: ``run`` fills its stream, ``abort`` ends it at the server and here."""

    def __init__(
        self,
        server: HttpServer,
        server_info: ServerInfo,
        request: GenerateRequest,
        stream: DeltaStream,
    ) -> None:
        self._server = server
        self._server_info = server_info
        self._request = request
        # No other request's id begins with this one: SGLang aborts all that do.
        self._request_id = f"{os.urandom(8).hex()}-{request.request_id}"
        self._stream = stream
        asked = request.sampling
        # With ignore_eos SGLang ignores stop tokens, too.
        cut_after = frozenset(asked.stop_token_ids) if asked.ignore_eos else ()
        self._reader = DeltaReader(asked.top_logprobs, cut_after, request.prompt_logprobs)
        self._aborted = False

    async def run(self) -> None:
        """Fill the stream. Raises the errors of ``TokenStream``."""
        handover = self._request.handover
        within_s = None if handover is None else handover.get(ANSWER_WITHIN_S)
        self._check_role()
        body = request_body(self._request, self._request_id, self._server_info)
        try:
            async with asyncio.timeout(within_s) as deadline:
                await self._read(body, deadline)
        except TimeoutError as error:
            await self._post_abort()
            raise EngineHandoverError(f"no KV arrived within {within_s:g} s") from error
        except FailedAnswerError as failed:
            message = str(failed)
            cause = await self._server.error_for(failed.status, message)
            waits_for_kv = handover is not None and not self._reader.begun
            # A healthy server that fails before the first token could not receive or send the KV.
            lacks_kv = waits_for_kv and type(cause) is EngineError
            raise (EngineHandoverError(message) if lacks_kv else cause) from failed
        if not self._reader.ended:
            raise EngineIncompleteError(f"{self._server.where} ended the stream before the answer")

    async def abort(self, running: asyncio.Task[None]) -> None:
        """Abort at the server before closing: it notices a closed connection seconds later."""
        self._aborted, begun_s = True, time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_WITHIN_S):
                while not running.done():
                    await self._post_abort()
                    await asyncio.wait({running}, timeout=_ABORT_AGAIN_S)
        if self._request.handover is not None:
            result = "ended" if running.done() else "has not ended"
            took_ms = (time.perf_counter() - begun_s) * 1e3
            log.info(
                "%s: disaggregated request %s %s %.1f ms after its abort",
                self._server.where,
                self._request_id,
                result,
                took_ms,
            )
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def _read(self, body: object, deadline: asyncio.Timeout) -> None:
        async with await self._server.post(GENERATE, body) as answer:
            async for data in answer:
                for delta in self._reader.feed(data):
                    if not self._aborted:
                        self._stream.feed(delta)
                if self._reader.begun:
                    deadline.reschedule(None)
                if self._reader.cut:
                    await self._post_abort()
                    return

    async def _post_abort(self) -> None:
        with suppress(EngineError):
            await self._server.ask(ABORT, method="POST", body={"rid": self._request_id})

    def _check_role(self) -> None:
        mode, handover = self._server_info.disaggregation_mode, self._request.handover
        where = f"{self._server.where} runs with --disaggregation-mode {mode}"
        if handover is None:
            if mode != "null":
                raise EngineNeedsPrefillError(
                    f"{where} and cannot serve a request alone: configure `disaggregation: {{kind: "
                    "always}`, and wait for a prefill server to be ready"
                )
            return
        role = "decode" if ANSWER_WITHIN_S in handover else "prefill"
        if mode != role:
            raise EngineHandoverError(f"{where}, but its `role` is {role}")
