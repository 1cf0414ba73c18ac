"""Places the requests of one model at a worker, where each counts in the load until its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from attrs import evolve, frozen

from commutator import tracing
from commutator.contract.engine import TokenStream
from commutator.contract.fairness import FairnessPolicy
from commutator.contract.request import GenerateRequest, RequestSummary, TokenDelta
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import KvPrompt
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineIncompleteError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    RoutingError,
)
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.queue import RouterQueue
from commutator.routing.router import ModelRouter, Route, describe_busy
from commutator.routing.workers import LiveWorker, LiveWorkers

log = logging.getLogger(__name__)

_PREFETCH_TIMEOUT_S = 5.0

Usable = Callable[[LiveWorker], bool]
"""Whether a worker may serve a request."""


def able(model: str, workers: Sequence[LiveWorker], request: GenerateRequest) -> Usable:
    """Which workers can do all that the request asks.

    Raises RequestError, which says why, when there are workers and none of them can.
    """
    unmet = [worker.record.info.unmet(request) for worker in workers]
    problems = [problem for problem in unmet if problem is not None]
    if problems and len(problems) == len(unmet):
        first, reasons = problems[0], dict.fromkeys(map(str, problems))
        text = f'no worker of model "{model}" can serve this: {"; ".join(reasons)}'
        raise RequestError(text, first.param, first.code)
    return lambda worker: worker.record.info.unmet(request) is None


@frozen(eq=False)
class Placement:
    """A routing decision whose load is counted. The owner releases the ticket."""

    route: Route
    ticket: Ticket


class Placer:
    """Places the requests of one model. Used from one event loop."""

    def __init__(
        self,
        model: str,
        router: ModelRouter,
        workers: LiveWorkers,
        load: InFlightLoad,
        busy: BusyConfig,
        *,
        on_waiting: Callable[[int], None],
        fairness: FairnessPolicy | None = None,
        for_first: bool = False,
        prefill: bool = False,
    ) -> None:
        """``on_waiting`` gets 1 when a request begins to wait for a worker, -1 when it stops.

        ``fairness`` orders the waiting requests of different principals; None: ``fifo``.
        ``for_first``: requests also wait where there is no worker, as one will be started.
        ``prefill``: choose among the prefill workers instead of the workers that decode.
        """
        self._model = model
        self._waits_for_first = for_first
        self._prefill = prefill
        self.router = router
        self.workers = workers
        self.load = load
        self._busy = busy
        self._prefetches: set[asyncio.Task[None]] = set()
        self._queue: RouterQueue[Placement] | None = None
        if busy.enabled or for_first:
            self._queue = RouterQueue(
                busy, self._undo, self._refusal, on_waiting, fairness, _prompt_tokens
            )

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._queue.waiting if self._queue is not None else 0

    @property
    def oldest_wait_s(self) -> float:
        """Seconds that the longest-waiting request has waited; 0 when none waits."""
        return self._queue.oldest_s if self._queue is not None else 0.0

    def wake(self) -> None:
        """A worker may have become free."""
        if self._queue is not None:
            self._queue.wake()

    async def place(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        request: GenerateRequest | None = None,
        *,
        may_wait: bool,
        usable: Usable | None = None,
    ) -> Placement:
        """Choose a worker that can be reached.

        While all are busy the request waits, or gets a busy worker if it may not wait. If the
        chosen worker's connection is lost, the policy chooses again among the others. ``usable``
        excludes workers. While ``request`` waits, the worker that would get it now may prefetch
        its blocks from slow tiers. Raises RoutingError when no worker is ready and none will be
        started, and its subclass
        OverloadedError when the request has waited too long or the queue is full.
        """
        if self._queue is not None and may_wait:
            return await self._place_in_turn(self._queue, summary, hashes, usable, request)
        while True:
            placement = self._take_any(summary, hashes, usable)
            if await self._reachable(placement):
                if self._queue is not None:
                    order = self._queue.order
                    place = order.place(summary.priority, summary.principal, summary.weight)
                    order.charge(place, _prompt_tokens(placement), 0)
                    placement.ticket.on_served = partial(order.charge, place)
                return placement

    def preview(
        self, summary: RequestSummary, hashes: Sequence[int], usable: Usable | None
    ) -> Placement:
        """Where a request would be placed now, were no worker too busy. Nothing is reserved."""
        placement = self._take_any(summary, hashes, usable)
        self._undo(placement)
        return placement

    async def _place_in_turn(
        self,
        queue: RouterQueue[Placement],
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Usable | None,
        request: GenerateRequest | None,
    ) -> Placement:
        arrived_s = asyncio.get_running_loop().time()
        order = queue.order
        place = order.place(summary.priority, summary.principal, summary.weight)
        attempt = partial(self._take_free, summary, hashes, usable)
        prefetch = None
        indexer = self.router.indexer
        if request is not None and indexer is not None and indexer.index.has_lower:
            prefetch = partial(self._prefetch, summary, hashes, usable, request)
        again = False
        while True:
            if not self._waits_for_first and not self.candidates(usable):
                raise self._none_ready()
            if usable is not None:
                queue.wake()  # the workers that others wait for need not be those of this request
            placement, waited_s = await queue.admit(
                place, arrived_s, attempt, again=again, on_near=prefetch
            )
            if await self._reachable(placement):
                placement.ticket.on_served = partial(order.charge, place)
                placement.route.waited_s = waited_s
                return placement
            order.charge(place, -_prompt_tokens(placement), 0)
            again = True

    def _prefetch(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Usable | None,
        request: GenerateRequest,
    ) -> None:
        """Have the worker that would get a waiting request now bring its blocks up.

        The request does not wait for that. Another worker may become free first; then the blocks
        serve a later request.
        """
        if workers := self.candidates(usable):
            route = self.router.route(summary, hashes, workers)
            overlap = route.candidate.overlap
            if overlap.blocks > overlap.device:
                task = asyncio.create_task(_ask_to_prefetch(route.worker, request))
                self._prefetches.add(task)
                task.add_done_callback(self._prefetches.discard)

    def _take_any(
        self, summary: RequestSummary, hashes: Sequence[int], usable: Usable | None
    ) -> Placement:
        workers = self.candidates(usable)
        if not workers:
            raise self._none_ready()
        return self._take(summary, self.router.route(summary, hashes, workers))

    def _take_free(
        self, summary: RequestSummary, hashes: Sequence[int], usable: Usable | None
    ) -> Placement | None:
        """None when every worker is busy or its connection is lost, or there is none."""
        workers = self.candidates(usable)
        if not workers:
            return None
        route = self.router.route_to_free(summary, hashes, workers, self._busy)
        return None if route is None else self._take(summary, route)

    def _take(self, summary: RequestSummary, route: Route) -> Placement:
        ticket = self.load.dispatch(
            route.candidate.worker_id,
            summary.prompt_tokens,
            self.router.block_size,
            cached_tokens=route.overlap_tokens,
        )
        return Placement(route, ticket)

    async def _reachable(self, placement: Placement) -> bool:
        """Connect to the worker if needed. Releases the load and returns False if that fails."""
        worker = placement.route.worker
        try:
            await worker.client.start()
        except EngineUnavailableError as error:
            log.warning("worker %s: connecting failed: %s", worker.record.worker_id, error)
            self.workers.lost(worker)
            self._undo(placement)
            return False
        except BaseException:
            self._undo(placement)
            raise
        return True

    def _undo(self, placement: Placement) -> None:
        self.load.release(placement.ticket)

    def candidates(self, usable: Usable | None = None) -> Sequence[LiveWorker]:
        """The workers that a request could be sent to now, busy ones included."""
        workers = self.workers.routable(self._model, prefill=self._prefill)
        return workers if usable is None else [worker for worker in workers if usable(worker)]

    def _none_ready(self) -> RoutingError:
        if self._prefill:
            return RoutingError(f'no prefill worker is ready for model "{self._model}"')
        if self.workers.routable(self._model, prefill=True):
            return RoutingError(
                f'only prefill workers are ready for model "{self._model}", and none that decodes'
            )
        return RoutingError(f'no worker is ready for model "{self._model}"')

    def _refusal(self, reason: str, problem: str, retry_after_s: float) -> RoutingError:
        workers = self.candidates()
        if not workers:
            return self._none_ready()
        hits = self.router.hits(workers, self._busy)
        # No worker need be busy: the requests in the queue may be about to be served.
        busy = f"{describe_busy(self._busy, hits)}; " if hits else ""
        return OverloadedError(f"{busy}{problem}", retry_after_s, reason)


async def _ask_to_prefetch(worker: LiveWorker, request: GenerateRequest) -> None:
    prompt = KvPrompt(
        token_ids=list(request.token_ids),
        cache_salt=request.cache_salt,
        adapter=request.adapter,
    )
    try:
        await worker.client.kv_prefetch(prompt, timeout_s=_PREFETCH_TIMEOUT_S)
    except CommutatorError as error:
        log.debug("worker %s: prefetch failed: %s", worker.record.worker_id, error)


def _prompt_tokens(placement: Placement) -> int:
    """What is charged for the prompt: at least one token, which is never cached."""
    return max(1, placement.ticket.prefill_tokens)


class WorkerRequest:
    """A request at one worker, which counts in its load until ``release``.

    Call ``release`` however the request ends.
    """

    stream: TokenStream
    """Set by the creator: the worker's own stream, or that of a ``DisaggRequest``."""

    def __init__(
        self,
        request: GenerateRequest,
        placement: Placement,
        indexer: KvIndexer | None,
        load: InFlightLoad,
        phase: Literal["prefill", "decode"] = "decode",
        on_first_token: Callable[[], None] | None = None,
    ) -> None:
        """``on_first_token`` is called once, when the worker's first token has arrived."""
        route = self.route = placement.route
        self.worker = route.worker
        self.ticket = placement.ticket
        self.recomputes = 0
        """Tokens whose KV another worker lost; 0 once this one has reported its cache hits."""
        self._indexer = indexer
        self._load = load
        # An engine's events may omit the salt; then they do not match the prompt's hashes.
        self._salted = request.cache_salt is not None
        self._on_first_token = on_first_token
        self._released = False
        self.worker.requests += 1
        record = self.worker.record
        rank = route.candidate.rank if record.info.data_parallel_size > 1 else None
        if indexer is not None:
            indexer.routed(record, route.candidate.rank, route.sequence_hashes)
        if request.data_parallel_rank != rank:
            request = evolve(request, data_parallel_rank=rank)
        tokens = self.ticket.prompt_tokens
        self.span: tracing.WorkerSpan | None = None
        if tracing.tracer is not None:
            worker_id = route.decision.worker_id
            self.span = tracing.worker_span(phase, worker_id, request.request_id, tokens)
            request = evolve(request, traceparent=self.span.traceparent)
        self.request = request
        """The request as sent to this worker: with its data-parallel rank and trace context."""

    @property
    def worker_id(self) -> str:
        return self.worker.record.worker_id

    def account(self, delta: TokenDelta) -> None:
        """Count the tokens that the worker sent in ``delta``."""
        if delta.token_ids:
            if self.ticket.prefilling:
                self._first_token()
            self._load.progress(self.ticket, len(delta.token_ids))

    def report_cached(self, cached_tokens: int) -> None:
        """Correct the expected cost of the prompt by the cache hits that the worker reported."""
        ticket = self.ticket
        if ticket.prefilling and ticket.on_served is not None:
            more = max(0, ticket.prompt_tokens - cached_tokens) - ticket.prefill_tokens
            if more:
                ticket.on_served(more, 0)

    def _first_token(self) -> None:
        if self.span is not None:
            self.span.event("first token")
        if self._indexer is not None and not self._salted:
            self._indexer.computed(self.worker_id, self.route.sequence_hashes)
        if self._on_first_token is not None:
            self._on_first_token()

    def incomplete(self) -> EngineError:
        """The error for a stream that ended without a finish reason."""
        if (reason := self.worker.gone) is not None:
            return EngineUnavailableError(f"worker {self.worker_id} is gone: {reason}")
        text = f"worker {self.worker_id} ended the stream without a finish reason"
        return EngineIncompleteError(text)

    def release(self, error: BaseException | None = None) -> None:
        """Release the load and end the span, with ``error`` if the request failed. Idempotent."""
        if not self._released:
            self._released = True
            self.worker.requests -= 1
            if self.span is not None:
                self.span.end(error)
            self._load.release(self.ticket)
