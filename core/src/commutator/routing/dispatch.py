"""One request from its first worker to its end: deltas out, hooks told, always exactly once.

A worker that is lost on the way is replaced by another, and the stream goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

from attrs import asdict, evolve, frozen

from commutator.errors import EngineIncompleteError, EngineUnavailableError, RoutingError
from commutator.plugins import PluginHost
from commutator.routing.apart import Apart
from commutator.routing.cache_view import CacheView
from commutator.routing.contract import Decision
from commutator.routing.leg import Leg
from commutator.routing.load import InFlightLoad
from commutator.routing.migration import Cause, Fail, Finish, Progress, cause_of, decide
from commutator.routing.moves import DispatchLimits, MigrationObserver, Moved
from commutator.routing.placer import Placed
from commutator.routing.route import RouteFacts
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import (
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    TokenDelta,
)

__all__ = ["Dispatch", "Surroundings"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1


@frozen(eq=False)
class Surroundings:
    """What a dispatch needs of routing."""

    cache: CacheView | None
    view: WorkerView
    load: InFlightLoad
    host: PluginHost
    place_again: Callable[
        [RequestSummary, GenerateRequest, Collection[LiveWorker]], Awaitable[Placed]
    ]
    """Another worker but these; raises RoutingError without any."""
    observer: MigrationObserver | None = None
    apart: Callable[[RequestSummary, GenerateRequest, Placed], Apart | None] | None = None
    """Asks whether to prefill elsewhere; None where no worker is for that."""


class Dispatch:
    """An async iterator over the request's deltas. Close it on every way out."""

    def __init__(
        self,
        summary: RequestSummary,
        request: GenerateRequest,
        placed: Placed,
        around: Surroundings,
        limits: DispatchLimits,
    ) -> None:
        self.summary = summary
        self.migrations: list[Moved] = []
        self._request = request
        self._around = around
        self._limits = limits
        self._started_s = time.perf_counter() - placed.route.waited_s
        self._generated: list[int] = []
        self._cached_tokens: int | None = None
        self._failures = 0
        self._patient_until_s = 0.0
        self._lost: set[LiveWorker] = set()
        self._full: set[LiveWorker] = set()
        self._over = False
        self._leg = self._begin(request, placed)

    @property
    def decision(self) -> Decision:
        return self._leg.route.decision

    @property
    def facts(self) -> RouteFacts:
        return self._leg.route.facts

    @property
    def worker_id(self) -> str:
        """Who serves it now."""
        return self._leg.worker_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Who served it, each worker once; those that were only full do not count."""
        if not self.migrations:
            return (self.worker_id,)
        served = (m.from_worker for m in self.migrations if m.reason != Cause.OVERLOADED)
        return tuple(dict.fromkeys((*served, self.worker_id)))

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        while True:
            error: Exception
            try:
                delta = await self._leg.stream.__anext__()
            except StopAsyncIteration:
                error = self._leg.cut_off()
            except asyncio.CancelledError:
                raise  # whoever cancelled closes the dispatch; the hooks are told there
            except Exception as raised:  # noqa: BLE001 - raised again unless it is recovered from
                error = raised
            else:
                if delta.finish_reason is not FinishReason.ABORT:
                    return self._account(delta)
                text = delta.error or f"worker {self.worker_id} aborted the request"
                error = EngineIncompleteError(text)
            end = await self._recover(error)
            if end is not None:
                return end

    async def aclose(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        await self._leg.stream.aclose()
        self._fail(asyncio.CancelledError())

    async def stop(self) -> None:
        """End it as finished: the caller has what it wants, such as a stop string. Idempotent."""
        await self._leg.stream.aclose()
        if not self._over:
            self._finish(FinishReason.STOP)

    def explain(self) -> dict[str, Any]:
        """Why this worker: see ``Route.explain``; with ``migrations`` if there were any.

        And with ``disaggregation`` if prefill elsewhere was possible.
        """
        explained = self._leg.route.explain()
        if self._leg.apart is not None:
            explained["disaggregation"] = self._leg.apart.explain()
        if self.migrations:
            explained["migrations"] = [asdict(moved) for moved in self.migrations]
        return explained

    def _begin(self, request: GenerateRequest, placed: Placed) -> Leg:
        around = self._around
        apart = None if around.apart is None else around.apart(self.summary, request, placed)
        return Leg(request, placed, around.cache, around.load, apart)

    def _account(self, delta: TokenDelta) -> TokenDelta:
        leg = self._leg
        if delta.cached_tokens is not None:
            self._tell_recomputed(leg, delta.cached_tokens)
            if self._cached_tokens is None:
                self._cached_tokens = delta.cached_tokens
            else:  # the client hears only of what its prompt found
                delta = evolve(delta, cached_tokens=None)
        if delta.token_ids:
            if not self._generated:
                ttft_s = time.perf_counter() - self._started_s
                self._around.host.request_first_token(self.summary, leg.worker_id, ttft_s)
            leg.account(delta)
            self._generated += delta.token_ids
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)
        return delta

    def _tell_recomputed(self, leg: Leg, cached_tokens: int) -> None:
        if leg.recomputes and self._around.observer is not None:
            tokens = max(0, leg.recomputes - cached_tokens)
            self._around.observer.recomputed(self.summary.model, tokens)
        leg.recomputes = 0

    async def _recover(self, error: Exception) -> TokenDelta | None:
        """A last delta, or None once another worker goes on. Raises ``error`` if neither can be."""
        leg = self._leg
        leg.release(error)
        if isinstance(error, EngineUnavailableError):
            self._around.view.lost(leg.worker)
        cause = cause_of(error, leg.worker.gone)
        action = decide(cause, self._progress())
        if isinstance(action, Finish):
            end = TokenDelta(finish_reason=action.reason, stop_reason=action.stop_reason)
            return self._account(end)
        if isinstance(action, Fail):
            self._fail(error)
            raise error
        await leg.stream.aclose()
        if action.cause is Cause.OVERLOADED:
            self._full.add(leg.worker)
        else:
            self._lost.add(leg.worker)
            self._failures += 1
            self._patient_until_s = asyncio.get_running_loop().time() + self._limits.wait_s
        request = self._rest()
        placed = await self._place_again(request)
        if placed is None:
            self._fail(error)
            raise error
        self._go_on(request, placed, action.cause)
        return None

    def _progress(self) -> Progress:
        return Progress(
            sampling=self._request.sampling,
            generated_tokens=len(self._generated),
            last_token=self._generated[-1] if self._generated else None,
            migrations=self._failures,
            limit=self._limits.migrations,
            time_left_s=self._limits.time_left_s(asyncio.get_running_loop().time()),
        )

    def _rest(self) -> GenerateRequest:
        """The request as another worker is to go on with it."""
        if not self._generated:
            return self._request
        return evolve(
            self._request,
            token_ids=[*self._request.token_ids, *self._generated],
            generated_prefix=self._request.generated_prefix + len(self._generated),
        )

    async def _place_again(self, request: GenerateRequest) -> Placed | None:
        """Another worker. One that was lost waits for it, one that was only refused does not."""
        summary = evolve(
            self.summary,
            prompt_tokens=len(request.token_ids),
            max_tokens=self.summary.max_tokens - len(self._generated),
        )
        while True:
            try:
                return await self._around.place_again(summary, request, self._lost | self._full)
            except RoutingError:
                now_s = asyncio.get_running_loop().time()
                if now_s >= self._patient_until_s or self._limits.time_left_s(now_s) <= 0:
                    return None
            await asyncio.sleep(_LOOK_AGAIN_S)
            self._full.clear()  # it may have room by now

    def _go_on(self, request: GenerateRequest, placed: Placed, cause: Cause) -> None:
        around, summary, generated = self._around, self.summary, len(self._generated)
        before = self._leg
        self._leg = self._begin(request, placed)
        if generated:
            self._leg.recomputes = len(request.token_ids)
        moved = Moved(before.worker_id, self.worker_id, cause.value, generated)
        self.migrations.append(moved)
        log.info(
            "request %s goes on at %s after %d tokens: %s, %s",
            summary.request_id, moved.to_worker, generated, moved.from_worker, moved.reason,
        )  # fmt: skip
        if around.observer is not None:
            around.observer.migrated(summary.model, moved.reason)
        around.host.request_migrated(
            summary, moved.from_worker, moved.to_worker, moved.reason, generated
        )
        around.host.request_routed(summary, placed.route.decision)

    def _finish(self, reason: FinishReason) -> None:
        self._over = True
        self._leg.release()
        self._around.host.request_finished(
            self.summary,
            RequestOutcome(
                worker_id=self.worker_id,
                finish_reason=reason,
                generated_tokens=len(self._generated),
                cached_tokens=self._cached_tokens or 0,
                duration_s=time.perf_counter() - self._started_s,
            ),
        )

    def _fail(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            self._leg.release(error)
            self._around.host.request_failed(self.summary, error)
