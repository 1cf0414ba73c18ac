"""The endpoints of `trtllm-serve`, as far as the connector and its users meet them.

Written from the published interfaces, it has the traps of the real one: queues that are read once,
errors that are all 400, streams that break off instead of saying why, unknown fields refused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web
from msgspec import json
from tests.support.trtllm.answers import Answer, error
from tests.support.trtllm.queues import EventQueue, StatisticsQueue
from tests.support.trtllm.requests import Refused, read_request

from commutator.contract.engine import TokenStream
from commutator.contract.request import GenerateRequest, TokenDelta
from commutator.contract.worker import EngineLoad
from commutator.errors import CommutatorError, EngineUnavailableError, RequestError

__all__ = ["StandIn", "TokenSource"]

VERSION = "1.3.0+stand.in"
_LOOK_S = 0.02


class TokenSource(Protocol):
    """What makes the tokens."""

    def generate(self, request: GenerateRequest) -> TokenStream: ...

    def context(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[tuple[TokenDelta, dict[str, Any] | None], None]:
        """The first token of a request, and its disaggregated_params unless that ended it."""

    def generation(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of a request that another server has begun, the first ones included."""

    async def load(self) -> EngineLoad: ...

    def encode(self, text: Any) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class StandIn:
    """One server. It waits ``wait_s`` for new events or statistics; the real one waits 2 s."""

    def __init__(
        self,
        source: TokenSource,
        events: EventQueue,
        statistics: StatisticsQueue,
        *,
        model: str = "stand-in",
        wait_s: float = 0.2,
    ) -> None:
        self.healthy = True
        self.bodies: list[dict[str, Any]] = []
        """Of all requests for tokens."""
        self.refuses: tuple[int, str] | None = None
        """Status and message for all requests for tokens."""
        self.broken = 0
        """How many streams ended without an error message."""
        self._source = source
        self._events = events
        self._statistics = statistics
        self._model = model
        self._wait_s = wait_s
        self._names = (f"stand-in-{number}" for number in itertools.count())

    @asynccontextmanager
    async def running(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Yields the URL."""
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        looking = asyncio.create_task(self._look())
        try:
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/kv_cache_events", self._kv_cache_events)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _look(self) -> None:
        while True:
            self._statistics.look(await self._source.load())
            await asyncio.sleep(_LOOK_S)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "owned_by": "tensorrt_llm"}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return await self._told_once(self._statistics.take)

    async def _kv_cache_events(self, _: web.Request) -> web.Response:
        return await self._told_once(self._events.take)

    async def _told_once(self, take: Callable[[], list[dict[str, Any]]]) -> web.Response:
        until_s = asyncio.get_running_loop().time() + self._wait_s
        while not (taken := take()) and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.01)
        return web.Response(body=json.encode(taken), content_type="application/json")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        body: dict[str, Any] = json.decode(await http.read())
        self.bodies.append(body)
        if self.refuses is not None:
            status, message = self.refuses
            return web.json_response(error(message, status), status=status)
        try:
            request = read_request(body, next(self._names), chat=chat, tokenize=self._source.encode)
        except Refused as refused:
            return web.json_response({"error": str(refused)}, status=400)
        answer = Answer(body, len(request.token_ids), chat, self._source.decode)
        words = body.get("disaggregated_params") or {}
        try:
            if words.get("request_type") == "context_only":
                return await self._context(request, words, answer)
            if words.get("request_type") == "generation_only":
                deltas = self._source.generation(request, words)
            else:
                deltas = _stream(self._source.generate(request))
            async with aclosing(deltas):
                if body.get("stream"):
                    return await self._streamed(http, deltas, answer)
                made = [delta async for delta in self._counted(deltas)]
            return _as_json(answer.whole(made, None, None))
        except EngineUnavailableError:
            raise web.HTTPInternalServerError from None
        except CommutatorError as failed:
            return web.json_response(error(str(failed)), status=400)
        finally:
            self._statistics.add(await self._source.load())

    async def _context(
        self, request: GenerateRequest, words: dict[str, Any], answer: Answer
    ) -> web.Response:
        async for delta, handed in self._source.context(request, words):
            reason = None if handed is None else "not_finished"
            whole = answer.whole([delta], reason, handed)
            return _as_json({**whole, "prompt_token_ids": list(request.token_ids)})
        raise web.HTTPInternalServerError

    async def _streamed(
        self, http: web.Request, deltas: AsyncIterator[TokenDelta], answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async for delta in self._counted(deltas):
                if not response.prepared:
                    await response.prepare(http)
                await response.write(_event(answer.chunk(delta)))
        except RequestError:  # detected before the stream begins
            raise
        except CommutatorError:
            if not response.prepared:
                await response.prepare(http)
            self.broken += 1
            assert http.transport is not None
            http.transport.close()
            return response
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event(answer.last_chunk()))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _counted(self, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[TokenDelta]:
        async for delta in deltas:
            self._statistics.add(await self._source.load())
            yield delta


async def _stream(stream: TokenStream) -> AsyncGenerator[TokenDelta, None]:
    async with aclosing(stream):
        async for delta in stream:
            yield delta


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.encode(payload) + b"\n\n"


def _as_json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=json.encode(body), content_type="application/json")
