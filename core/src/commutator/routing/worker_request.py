"""A request at one worker: its token stream and its share of the worker's load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from attrs import evolve

from commutator.contract.engine import TokenStream
from commutator.contract.request import GenerateRequest, TokenDelta
from commutator.errors import EngineError, EngineIncompleteError, EngineUnavailableError
from commutator.routing.load import InFlightLoad
from commutator.routing.placement import Placement
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.tracing import begin_worker_span

__all__ = [
    "WorkerRequest",
]


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
        self.span = begin_worker_span(phase, route.decision.worker_id, request.request_id, tokens)
        if self.span is not None:
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
