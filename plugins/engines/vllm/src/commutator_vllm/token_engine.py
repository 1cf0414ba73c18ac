"""The token API's engine over vLLM's AsyncLLM, which ``async_llm`` adapts: no vLLM is imported."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from commutator import (
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from commutator.errors import CommutatorError, EngineUnavailableError
from commutator_engine_kit import Emit, TokenEngine
from commutator_engine_kit.completions import finish_reason_named
from commutator_vllm.messages import hands_over, likeliest

__all__ = ["AsyncEngine", "OutputReader", "Outputs", "RequestOutput", "VllmTokenEngine"]

_LEAST_LOGPROB = -9999.0
"""What vLLM's HTTP API says for a probability of zero."""


class CompletionOutput(Protocol):
    """What one step added to an answer."""

    token_ids: Any
    logprobs: Any
    """For each token, a mapping of token ids to objects with ``logprob``; None: not asked for."""
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """vLLM's RequestOutput of the kind DELTA, with one answer."""

    outputs: list[Any]
    num_cached_tokens: int | None
    kv_transfer_params: Mapping[str, Any] | None


class OutputReader:
    """Turns the outputs of one request into its deltas."""

    def __init__(self, request: GenerateRequest) -> None:
        self._top = request.sampling.top_logprobs
        self._decodes = request.handover is not None and not hands_over(request.handover)
        self._began = False

    def delta(self, output: RequestOutput) -> TokenDelta | None:
        """None for an output that says nothing."""
        part: CompletionOutput = output.outputs[0]
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
            cached_tokens=self._cached(output),
        )

    def _last(
        self, output: RequestOutput, part: CompletionOutput, token_ids: tuple[int, ...]
    ) -> TokenDelta:
        assert part.finish_reason is not None
        reason = finish_reason_named(part.finish_reason)
        failed = reason is FinishReason.ERROR
        return TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(part, token_ids),
            finish_reason=reason,
            stop_reason=part.stop_reason,
            cached_tokens=self._cached(output),
            handover=output.kv_transfer_params,
            error="vLLM failed the request; its log says why" if failed else None,
            # A server that fails a decode request did not get the KV.
            handover_failed=failed and self._decodes,
        )

    def _cached(self, output: RequestOutput) -> int | None:
        if self._began:
            return None
        self._began = True
        return output.num_cached_tokens

    def _logprobs(
        self, part: CompletionOutput, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprob, ...]:
        if self._top is None or part.logprobs is None:
            return ()
        return tuple(map(self._logprob, token_ids, part.logprobs))

    def _logprob(self, token_id: int, position: Mapping[int, Any]) -> TokenLogprob:
        known = {token: _bounded(entry.logprob) for token, entry in position.items()}
        return TokenLogprob(
            token_id=token_id,
            logprob=known.get(token_id, _LEAST_LOGPROB),
            top=likeliest(known, self._top or 0),
        )


def _bounded(logprob: float) -> float:
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)


log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncEngine(ABC):
    """What the token API asks of AsyncLLM. Used from one event loop."""

    info: EngineInfo
    """What the server serves."""

    @abstractmethod
    def knows(self, lora_name: str) -> bool:
        """Whether this adapter is loaded. Raises RequestError when it cannot be loaded, either."""

    @abstractmethod
    async def load_adapter(self, lora_name: str) -> None:
        """Load an adapter by vLLM's resolvers. Raises RequestError when they have none."""

    @abstractmethod
    def register(self, request: GenerateRequest, outputs: Outputs) -> Any:
        """Check a request and register where its outputs go. Returns what ``send`` takes.

        Sets ``outputs.request_id``. Raises RequestError, EngineOverloadedError, and
        EngineUnavailableError when the engine is dead.
        """

    @abstractmethod
    async def send(self, registered: Any) -> None:
        """Send a registered request to the engine core."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort a registered request."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """The load after the last step. Raises EngineUnavailableError when the engine is dead."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs."""


class Outputs:
    """Where AsyncLLM puts the outputs of one request, in place of its RequestOutputCollector."""

    def __init__(self, engine: VllmTokenEngine, key: int, request: GenerateRequest) -> None:
        self.request_id = ""
        """vLLM's own id of the request."""
        self._engine = engine
        self._key = key
        self._reader = OutputReader(request)

    def put(self, output: RequestOutput | Exception) -> None:
        """Called by AsyncLLM after each step; an exception means that the engine is dead."""
        if isinstance(output, Exception):
            self._engine.died(output)
        elif (delta := self._reader.delta(output)) is not None:
            self._engine.ready(self._key, delta)


class VllmTokenEngine(TokenEngine):
    """Serves requests without a task for each: what a step of vLLM produced is emitted at once.

    ``on_death`` is called once when the engine core has died.
    """

    def __init__(self, engine: AsyncEngine, on_death: Callable[[], None]) -> None:
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
        name = request.adapter_digest
        if name is not None and not self._engine.knows(name):
            self._registered[key] = outputs
            self._run(self._with_adapter(key, request, outputs, name))
            return
        registered = self._call(lambda: self._engine.register(request, outputs))
        self._registered[key] = outputs
        self._run(self._send(key, registered))

    async def _with_adapter(
        self, key: int, request: GenerateRequest, outputs: Outputs, name: str
    ) -> None:
        try:
            await self._engine.load_adapter(name)
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
