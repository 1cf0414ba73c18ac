"""The token API's engine over vLLM's AsyncLLM, which ``async_llm`` adapts: no vLLM is imported.

``TokenApi``, ASGI middleware that a launched server loads by ``--middleware``, makes the server
serve the token API, too, on the same engine. It adds nothing to vLLM's own endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve

from commutator import (
    AdapterIdentity,
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from commutator.errors import CommutatorError, EngineUnavailableError
from commutator_engine_kit import Emit, TokenApiServer, TokenEngine
from commutator_engine_kit.completions import finish_reason_named, likeliest
from commutator_vllm.messages import alternatives, hands_over, prompt_entries

if TYPE_CHECKING:
    from commutator_vllm.async_llm import AsyncLlmEngine


log = logging.getLogger("vllm.commutator")  # vLLM configures only its own loggers

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LISTEN_AT = "COMMUTATOR_VLLM_TOKEN_API"
"""The environment variable with the address of the token API, "host:port"."""

_LEAST_LOGPROB = -9999.0
"""What vLLM's HTTP API says for a probability of zero."""


class Outputs:
    """Where AsyncLLM puts the outputs of one request, in place of its RequestOutputCollector."""

    def __init__(self, engine: VllmTokenEngine, key: int, request: GenerateRequest) -> None:
        self.request_id = ""
        """vLLM's own id of the request."""
        self._engine = engine
        self._key = key
        self._request = request
        self._top = alternatives(request)
        self._decodes = request.handover is not None and not hands_over(request.handover)
        self._began = False

    def put(self, output: Any) -> None:
        """Called by AsyncLLM after each step, with its RequestOutput of the kind DELTA.

        An exception instead means that the engine is dead.
        """
        if isinstance(output, Exception):
            self._engine.died(output)
        elif (delta := self._delta(output)) is not None:
            self._engine.ready(self._key, delta)

    def _delta(self, output: Any) -> TokenDelta | None:
        """None for an output that says nothing."""
        part = output.outputs[0]
        token_ids = tuple(part.token_ids)
        if part.finish_reason is not None:
            return self._last(output, part, token_ids)
        if not token_ids:
            return None
        if self._top is None and self._began:  # nearly all
            return TokenDelta(token_ids=token_ids)
        return TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(part, token_ids),
            prompt_logprobs=self._prompt_logprobs(output),
            cached_tokens=self._cached(output),
        )

    def _last(self, output: Any, part: Any, token_ids: tuple[int, ...]) -> TokenDelta:
        reason = finish_reason_named(part.finish_reason)
        failed = reason is FinishReason.ERROR
        return TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(part, token_ids),
            prompt_logprobs=self._prompt_logprobs(output),
            finish_reason=reason,
            stop_reason=part.stop_reason,
            cached_tokens=self._cached(output),
            handover=output.kv_transfer_params,
            error="vLLM failed the request; its log says why" if failed else None,
            # A server that fails a decode request did not get the KV.
            handover_failed=failed and self._decodes,
        )

    def _cached(self, output: Any) -> int | None:
        began, self._began = self._began, True
        return None if began else output.num_cached_tokens

    def _prompt_logprobs(self, output: Any) -> tuple[TokenLogprob, ...]:
        """They come with the first token."""
        request = self._request
        if request.prompt_logprobs is None or self._began or not output.prompt_logprobs:
            return ()
        found = prompt_entries(request.token_ids, output.prompt_logprobs, request.prompt_logprobs)
        return tuple(
            evolve(
                entry,
                logprob=_bounded(entry.logprob),
                top=tuple((one, _bounded(logprob)) for one, logprob in entry.top),
            )
            for entry in found
        )

    def _logprobs(self, part: Any, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if self._top is None or part.logprobs is None:
            return ()
        return tuple(map(self._logprob, token_ids, part.logprobs))

    def _logprob(self, token_id: int, position: Mapping[int, Any]) -> TokenLogprob:
        known = {token: _bounded(entry.logprob) for token, entry in position.items()}
        return TokenLogprob(
            token_id=token_id,
            logprob=known.get(token_id, _LEAST_LOGPROB),
            top=likeliest(known.items(), self._top or 0),
        )


def _bounded(logprob: float) -> float:
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)


class VllmTokenEngine(TokenEngine):
    """Serves requests without a task for each: what a step of vLLM produced is emitted at once.

    ``on_death`` is called once when the engine core has died.
    """

    def __init__(self, engine: AsyncLlmEngine, on_death: Callable[[], None]) -> None:
        self._engine = engine
        self._on_death: Callable[[], None] | None = on_death
        self._emit: Emit | None = None
        self._ready: list[tuple[int, TokenDelta]] = []
        self._registered: dict[int, Outputs] = {}
        """Requests that have not ended, by the token API's key."""
        self._sending: set[asyncio.Task[None]] = set()

    def start(self, emit: Emit) -> EngineInfo:
        self._emit = emit
        return self._engine.info

    def submit(self, key: int, request: GenerateRequest) -> None:
        outputs = Outputs(self, key, request)
        adapter = request.adapter
        if adapter is not None and not self._engine.knows(adapter):
            self._registered[key] = outputs
            self._run(self._with_adapter(key, request, outputs, adapter))
            return
        registered = self._call(lambda: self._engine.register(request, outputs))
        self._registered[key] = outputs
        self._run(self._send(key, registered))

    async def _with_adapter(
        self, key: int, request: GenerateRequest, outputs: Outputs, adapter: AdapterIdentity
    ) -> None:
        try:
            await self._engine.load_adapter(adapter)
            if key not in self._registered:
                return  # aborted meanwhile
            registered = self._call(lambda: self._engine.register(request, outputs))
        except CommutatorError as error:
            self._failed(key, str(error))
        else:
            await self._send(key, registered)

    async def _send(self, key: int, registered: Any) -> None:
        try:
            await self._engine.send(registered)
        except EngineUnavailableError as error:
            self.died(error)
        except Exception as error:
            log.exception("vLLM did not take a request")
            self._failed(key, f"vLLM did not take the request: {error}")

    def _failed(self, key: int, reason: str) -> None:
        self.ready(key, TokenDelta(finish_reason=FinishReason.ERROR, error=reason))

    def ready(self, key: int, delta: TokenDelta) -> None:
        """Emit a delta with all others of this turn of the event loop."""
        if delta.finish_reason is not None:
            self._registered.pop(key, None)
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._flush)
        self._ready.append((key, delta))

    def _flush(self) -> None:
        assert self._emit is not None
        ready, self._ready = self._ready, []
        self._emit(ready)

    def died(self, error: Exception) -> None:
        """The engine core has died; called for every request that it had."""
        on_death, self._on_death = self._on_death, None
        if on_death is not None:
            log.critical("vLLM's engine core has died: %s", error)
            on_death()

    def abort(self, key: int) -> None:
        outputs = self._registered.pop(key, None)
        if outputs is not None and outputs.request_id:
            self._run(self._engine.abort(outputs.request_id))

    def load(self) -> EngineLoad:
        return self._call(self._engine.load)

    def reset_prefix_cache(self) -> None:
        self._run(self._engine.reset_prefix_cache())

    def stop(self) -> None:
        """Does nothing: vLLM's server stops the engine."""

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except EngineUnavailableError as error:
            self.died(error)
            raise

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


class TokenApi:
    """Serves the token API from the end of the app's start to its shutdown."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._server: TokenApiServer | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        state = scope["app"].state

        async def send_when_ready(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._start(state)
                except (OSError, ValueError) as error:
                    message = {"type": "lifespan.startup.failed", "message": f"token API: {error}"}
            await send(message)

        try:
            await self._app(scope, receive, send_when_ready)
        finally:
            if self._server is not None:
                await self._server.stop()

    async def _start(self, state: Any) -> None:
        from commutator_vllm.async_llm import AsyncLlmEngine

        host, _, port = os.environ[LISTEN_AT].rpartition(":")
        engine = await AsyncLlmEngine.of(state, host)
        self._server = TokenApiServer(VllmTokenEngine(engine, self._died))
        bound = await self._server.start(host, int(port))
        log.info("token API on %s:%d", host, bound)

    def _died(self) -> None:
        """Close every connection: clients continue their answers elsewhere. vLLM ends itself."""
        assert self._server is not None
        self._stopping = asyncio.get_running_loop().create_task(self._server.stop())
