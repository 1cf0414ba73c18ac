"""One request on its worker: deltas out, load accounted, hooks told, always exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from attrs import evolve

from commutator.errors import EngineError, EngineUnavailableError
from commutator.plugins import PluginHost
from commutator.routing.cache_view import CacheView
from commutator.routing.contract import Decision
from commutator.routing.load import InFlightLoad
from commutator.routing.placer import Placed
from commutator.routing.route import RouteFacts
from commutator.routing.view import WorkerView
from commutator.types import (
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    TokenDelta,
)

__all__ = ["Dispatch"]


class Dispatch:
    """An async iterator over the request's deltas. Close it on every way out."""

    def __init__(
        self,
        summary: RequestSummary,
        request: GenerateRequest,
        placed: Placed,
        cache: CacheView | None,
        view: WorkerView,
        load: InFlightLoad,
        host: PluginHost,
    ) -> None:
        self.summary = summary
        route = self.route = placed.route
        self._worker = route.worker
        self._cache = cache
        self._view = view
        self._load = load
        self._host = host
        self._started_s = time.perf_counter() - route.waited_s
        record = route.worker.record
        self._ticket = placed.ticket
        self._salted = request.cache_salt is not None
        self._cached_tokens = 0
        self._over = False
        if cache is not None:
            cache.routed(record, route.sequence_hashes)
        if record.info.data_parallel_size > 1:
            request = evolve(request, data_parallel_rank=route.candidate.rank)
        self._stream = route.worker.client.generate(request)

    @property
    def decision(self) -> Decision:
        return self.route.decision

    @property
    def facts(self) -> RouteFacts:
        return self.route.facts

    @property
    def worker_id(self) -> str:
        return self._worker.record.worker_id

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        try:
            delta = await self._stream.__anext__()
        except StopAsyncIteration:
            error = EngineError(f"worker {self.worker_id} ended the stream without a finish reason")
            self._end(error)
            raise error from None
        except asyncio.CancelledError:
            raise  # whoever cancelled closes the dispatch; the hooks are told there
        except EngineUnavailableError as error:
            self._view.lost(self._worker)
            self._end(error)
            raise
        except Exception as error:
            self._end(error)
            raise
        self._account(delta)
        return delta

    async def aclose(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        await self._stream.aclose()
        self._end(asyncio.CancelledError())

    async def stop(self) -> None:
        """End it as finished: the caller has what it wants, such as a stop string. Idempotent."""
        await self._stream.aclose()
        if not self._over:
            self._finish(FinishReason.STOP)

    def explain(self) -> dict[str, Any]:
        """Why this worker: see ``Route.explain``."""
        return self.route.explain()

    def _account(self, delta: TokenDelta) -> None:
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if delta.token_ids:
            if self._ticket.prefilling:
                ttft_s = time.perf_counter() - self._started_s
                self._host.request_first_token(self.summary, self.worker_id, ttft_s)
                # An engine's events may leave the salt out, so nothing is expected of them then.
                if self._cache is not None and not self._salted:
                    self._cache.computed(self.worker_id, self.route.sequence_hashes)
            self._load.progress(self._ticket, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)

    def _finish(self, reason: FinishReason) -> None:
        self._close_account()
        self._host.request_finished(
            self.summary,
            RequestOutcome(
                worker_id=self.worker_id,
                finish_reason=reason,
                generated_tokens=self._ticket.generated_tokens,
                cached_tokens=self._cached_tokens,
                duration_s=time.perf_counter() - self._started_s,
            ),
        )

    def _end(self, error: BaseException) -> None:
        if not self._over:
            self._close_account()
            self._host.request_failed(self.summary, error)

    def _close_account(self) -> None:
        self._over = True
        self._load.release(self._ticket)
