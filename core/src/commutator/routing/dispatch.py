"""One request from its first worker to its end.

When a worker fails, ``decide`` says what follows: another worker continues the answer, or the
request ends, or fails. The default is one migration, so that a request that crashes its workers
does not crash all of them. ``Dispatch`` carries it out, and calls the hooks of a request: exactly
one ``request_finished`` or ``request_failed`` is the last.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

from attrs import asdict, evolve, frozen

from commutator.contract.registry import LAPSED
from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    SamplingParams,
    TokenDelta,
)
from commutator.errors import (
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
    RoutingError,
)
from commutator.routing.disagg.prefill_pool import DisaggDecision
from commutator.routing.disagg.request import DisaggRequest
from commutator.routing.model import ModelRouting
from commutator.routing.placement import Placement, WorkerRequest
from commutator.routing.router import Route
from commutator.routing.workers import LiveWorker

log = logging.getLogger(__name__)


class Cause(StrEnum):
    """Why a worker did not finish a request that another one may finish."""

    CONNECTION_LOST = "connection_lost"
    INCOMPLETE_STREAM = "incomplete_stream"
    LEASE_EXPIRED = "lease_expired"
    DRAINED = "drained"
    """The worker was stopped while it drained, with requests that took too long. Nothing failed."""
    OVERLOADED = "overloaded"
    """The worker is healthy and refused the request; that is not a failure of the worker."""


@frozen
class Progress:
    """How much of a request is done, and its limits for migrations."""

    sampling: SamplingParams
    """As the client sent it: lengths count from the beginning of the answer."""
    generated_tokens: int
    last_token: int | None
    """The newest token of the answer."""
    migrations: int
    """Migrations so far; those away from a full or a drained worker do not count."""
    limit: int
    time_left_s: float


@frozen
class Migrate:
    """Send the prompt and the answer so far to another worker."""

    cause: Cause


@frozen
class Finish:
    """The answer is complete; only the worker's finish reason is missing."""

    reason: FinishReason
    stop_reason: int | None = None


@frozen
class Fail:
    """Report the error to the client."""


Action = Migrate | Finish | Fail


def cause_of(error: Exception, gone: str | None, *, draining: bool = False) -> Cause | None:
    """The reason to migrate, if ``error`` is one.

    ``gone``: the registry's reason for removing the worker; None while it is registered.
    ``draining``: whether it got no new requests any more. Returns None where another worker would
    fail in the same way: the request was refused, or the engine failed while computing it.
    """
    match error:
        case EngineOverloadedError():
            return Cause.OVERLOADED
        case EngineUnavailableError() | EngineIncompleteError() if draining:
            return Cause.DRAINED
        case EngineUnavailableError():
            return Cause.LEASE_EXPIRED if gone == LAPSED else Cause.CONNECTION_LOST
        case EngineIncompleteError():
            return Cause.INCOMPLETE_STREAM
    return None


def decide(cause: Cause | None, progress: Progress) -> Action:
    """What to do when a worker does not finish a request."""
    if cause is None or progress.time_left_s <= 0:
        return Fail()
    if cause is Cause.OVERLOADED:
        return Migrate(cause)  # no limit but the number of workers: none is tried twice
    if (end := _natural_end(progress)) is not None:
        return end
    if cause is Cause.DRAINED:
        return Migrate(cause)  # as often as workers are stopped, which is no fault of the request
    return Migrate(cause) if progress.migrations < progress.limit else Fail()


def _natural_end(progress: Progress) -> Finish | None:
    """The end that the answer's tokens have reached. The front door checks stop strings itself."""
    sampling, generated = progress.sampling, progress.generated_tokens
    stops = generated >= max(1, sampling.min_tokens)
    if stops and progress.last_token in sampling.stop_token_ids:
        return Finish(FinishReason.STOP, progress.last_token)
    return Finish(FinishReason.LENGTH) if generated >= sampling.max_tokens else None


_RETRY_S = 0.1


@frozen
class DispatchLimits:
    """How often, and until when, a request may change its worker."""

    migrations: int = 0
    wait_s: float = 0.0
    """Seconds that a request which lost its worker waits for another one."""
    deadline_s: float | None = None
    """No other worker is tried after this time of the event loop's clock. None: no deadline."""

    def time_left_s(self, now_s: float) -> float:
        return math.inf if self.deadline_s is None else self.deadline_s - now_s


@frozen
class Migration:
    """One change of worker."""

    from_worker: str
    to_worker: str
    reason: str
    generated_tokens: int
    """Tokens of the answer before the change."""


class Dispatch:
    """An async iterator over the request's deltas. Close it however the request ends."""

    def __init__(
        self,
        summary: RequestSummary,
        request: GenerateRequest,
        placement: Placement,
        routing: ModelRouting,
        limits: DispatchLimits,
    ) -> None:
        self.summary = summary
        self.migrations: list[Migration] = []
        self._request = request
        self._routing = routing
        self._limits = limits
        self._started_s = time.perf_counter() - placement.route.waited_s
        self._generated: list[int] = []
        self._cached_tokens: int | None = None
        self._recomputed_tokens = 0
        self._failures = 0
        self._retry_until_s = 0.0
        self._lost: set[LiveWorker] = set()
        self._full: set[LiveWorker] = set()
        self._suspect_hosts: set[str] = set()
        self._over = False
        self._disagg: DisaggDecision | None = None
        self._begin(request, placement)

    @property
    def route(self) -> Route:
        """Why this worker serves the request now."""
        return self._current.route

    @property
    def worker_id(self) -> str:
        """The worker that serves the request now."""
        return self._current.worker_id

    @property
    def separate(self) -> bool:
        """Whether the disaggregation policy has a prefill worker compute the prompt."""
        return self._disagg is not None and self._disagg.answer.separate

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Each worker that served the request, once; without workers that were only full."""
        if not self.migrations:
            return (self.worker_id,)
        served = (m.from_worker for m in self.migrations if m.reason != Cause.OVERLOADED)
        return tuple(dict.fromkeys((*served, self.worker_id)))

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._generated)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        while True:
            error: Exception
            try:
                delta = await self._current.stream.__anext__()
            except StopAsyncIteration:
                error = self._current.incomplete()
            except asyncio.CancelledError:
                raise  # the caller closes the dispatch, which calls the hook
            except Exception as raised:  # noqa: BLE001 - raised again unless the request recovers
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
        await self._current.stream.aclose()
        self._fail(asyncio.CancelledError())

    async def stop(self) -> None:
        """Finish the request: the caller has what it needs, such as a stop string. Idempotent."""
        await self._current.stream.aclose()
        if not self._over:
            self._finish(FinishReason.STOP)

    def explain(self) -> dict[str, Any]:
        """Why this worker was chosen; see ``Route.explain``.

        Contains ``disaggregation`` if a prefill worker could have been used, and ``migrations``
        if there were any.
        """
        explained = self._current.route.explain()
        if self._disagg is not None:
            explained["disaggregation"] = self._disagg.explain()
            if isinstance(stream := self._current.stream, DisaggRequest):
                explained["disaggregation"] |= stream.explain()
        if self.migrations:
            explained["migrations"] = [asdict(moved) for moved in self.migrations]
        return explained

    def _begin(self, request: GenerateRequest, placement: Placement) -> None:
        """Send the request to its worker, after a prefill elsewhere if the policy decides so."""
        routing, pool = self._routing, self._routing.prefill
        if request.prompt_logprobs is not None or request.pooling is not None:
            pool = None  # the worker computes all of the prompt
        decision = self._disagg = (
            None if pool is None else pool.decide(self.summary, request, placement)
        )
        on_first_token = None
        if pool is not None and decision is not None and not decision.answer.separate:
            on_first_token = partial(pool.prefilled_locally, decision, placement)
        self._current = current = WorkerRequest(
            request, placement, routing.router.indexer, routing.load, "decode", on_first_token
        )
        if pool is not None and decision is not None and decision.answer.separate:
            current.stream = DisaggRequest(pool, self.summary, decision, current)
        else:
            current.stream = current.worker.client.generate(current.request)

    def _account(self, delta: TokenDelta) -> TokenDelta:
        current = self._current
        if delta.cached_tokens is not None:
            current.report_cached(delta.cached_tokens)
            self._recomputed_tokens += max(0, current.recomputes - delta.cached_tokens)
            current.recomputes = 0
            if self._cached_tokens is None:
                self._cached_tokens = delta.cached_tokens
            else:  # hits at later workers are not hits of the client's prompt
                delta = evolve(delta, cached_tokens=None)
        if delta.token_ids or delta.vectors:
            if not self._generated:
                ttft_s = time.perf_counter() - self._started_s
                self._routing.host.request_first_token(self.summary, current.worker_id, ttft_s)
            current.account(delta)
            self._generated += delta.token_ids
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)
        return delta

    async def _recover(self, error: Exception) -> TokenDelta | None:
        """Continue at another worker, or finish an answer that is complete.

        Returns the last delta of a complete answer, or None once another worker continues. Raises
        ``error`` if none can.
        """
        current = self._current
        current.release(error)
        if isinstance(error, EngineUnavailableError):
            self._routing.workers.lost(current.worker)
        worker = current.worker
        cause = cause_of(error, worker.gone, draining=worker.record.draining)
        action = decide(cause, self._progress())
        if isinstance(action, Finish):
            end = TokenDelta(finish_reason=action.reason, stop_reason=action.stop_reason)
            return self._account(end)
        if isinstance(action, Fail):
            self._fail(error)
            raise error
        await current.stream.aclose()
        if action.cause is Cause.OVERLOADED:
            self._full.add(current.worker)
        else:
            self._lost.add(current.worker)
            if action.cause is not Cause.DRAINED:
                self._failures += 1
                self._suspect_hosts.add(current.worker.record.host)
            self._retry_until_s = asyncio.get_running_loop().time() + self._limits.wait_s
        request = self._rest()
        placement = await self._place_again(request)
        if placement is None:
            self._fail(error)
            raise error
        self._migrate(request, placement, action.cause)
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
        """The request for another worker: the answer so far is part of the prompt."""
        if not self._generated:
            return self._request
        return evolve(
            self._request,
            token_ids=[*self._request.token_ids, *self._generated],
            prompt_logprobs=None,  # they came with the first token
            generated_prefix=self._request.generated_prefix + len(self._generated),
        )

    async def _place_again(self, request: GenerateRequest) -> Placement | None:
        """A worker that can continue the answer; None if none is found in time.

        A request that lost its worker retries for ``limits.wait_s``. A request that a full worker
        refused does not retry. What took a worker may have taken its whole host, which the others
        there do not show at once, so workers of other hosts come first. What cut this front door
        off from a worker may have cut it off from all, so one that leaves pings unanswered gets
        nothing: it will answer, or be lost as well.
        """
        begun = request.generated_prefix > 0

        def usable(worker: LiveWorker) -> bool:
            if worker in self._lost or worker in self._full or not worker.client.answers:
                return False
            info = worker.record.info
            constrained = request.constraint is not None
            continues = info.continues_constraints if constrained else info.continues_answers
            if begun and not continues:
                return False
            return info.unmet(request) is None

        def elsewhere(worker: LiveWorker) -> bool:
            return usable(worker) and worker.record.host not in self._suspect_hosts

        routing = self._routing
        summary = evolve(
            self.summary,
            prompt_tokens=len(request.token_ids),
            max_tokens=self.summary.max_tokens - len(self._generated),
        )
        hashes = routing.router.hashes(request)
        while True:
            for choice in (elsewhere, usable):
                with suppress(RoutingError):
                    return await routing.placer.place(
                        summary, hashes, may_wait=False, usable=choice
                    )
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._retry_until_s or self._limits.time_left_s(now_s) <= 0:
                return None
            await asyncio.sleep(_RETRY_S)
            self._full.clear()  # full workers may have room now

    def _migrate(self, request: GenerateRequest, placement: Placement, cause: Cause) -> None:
        host, summary, generated = self._routing.host, self.summary, len(self._generated)
        from_worker, to_worker = self.worker_id, placement.route.worker.record.worker_id
        self.migrations.append(Migration(from_worker, to_worker, cause.value, generated))
        log.info(
            "request %s migrated from %s to %s after %d tokens: %s",
            summary.request_id, from_worker, to_worker, generated, cause.value,
        )  # fmt: skip
        host.request_migrated(summary, from_worker, to_worker, cause.value, generated)
        host.request_routed(summary, placement.route.decision)
        self._begin(request, placement)
        if generated:
            self._current.recomputes = len(request.token_ids)

    def _finish(self, reason: FinishReason) -> None:
        self._over = True
        self._current.release()
        self._routing.host.request_finished(
            self.summary,
            RequestOutcome(
                worker_id=self.worker_id,
                finish_reason=reason,
                generated_tokens=len(self._generated),
                cached_tokens=self._cached_tokens or 0,
                recomputed_tokens=self._recomputed_tokens,
                duration_s=time.perf_counter() - self._started_s,
            ),
        )

    def _fail(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            self._current.release(error)
            self._routing.host.request_failed(self.summary, error, self.worker_id)
