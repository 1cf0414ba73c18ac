"""A request on one of the workers that serve it: its stream, and its share of the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import evolve

from commutator.errors import EngineError, EngineIncompleteError, EngineUnavailableError
from commutator.observe.tracing import begin_leg
from commutator.routing.cache_view import CacheView
from commutator.routing.load import InFlightLoad
from commutator.routing.placer import Placed
from commutator.types import GenerateRequest, TokenDelta

if TYPE_CHECKING:
    from commutator.routing.apart import Apart

__all__ = ["Leg"]


class Leg:
    """Begun when it is made. ``release`` it on every way out."""

    def __init__(
        self,
        request: GenerateRequest,
        placed: Placed,
        cache: CacheView | None,
        load: InFlightLoad,
        apart: Apart | None = None,
        phase: Literal["prefill", "decode"] = "decode",
    ) -> None:
        route = self.route = placed.route
        self.worker = route.worker
        self.ticket = placed.ticket
        self.apart = apart
        self.recomputes = 0
        """Tokens whose KV another worker had, as far as this one has not said that it has it."""
        self._cache = cache
        self._load = load
        # An engine's events may leave the salt out, so nothing is expected of them then.
        self._salted = request.cache_salt is not None
        self._released = False
        record = self.worker.record
        if cache is not None:
            cache.routed(record, route.candidate.rank, route.sequence_hashes)
        if record.info.data_parallel_size > 1:
            request = evolve(request, data_parallel_rank=route.candidate.rank)
        tokens = self.ticket.prompt_tokens
        self.span = begin_leg(phase, route.decision.worker_id, request.request_id, tokens)
        if self.span is not None:
            request = evolve(request, traceparent=self.span.traceparent)
        self.stream = (
            self.worker.client.generate(request) if apart is None else apart.begin(request)
        )

    @property
    def worker_id(self) -> str:
        return self.worker.record.worker_id

    def account(self, delta: TokenDelta) -> None:
        """The worker sent this."""
        if delta.token_ids:
            if self.ticket.prefilling:
                self._first_token()
            self._load.progress(self.ticket, len(delta.token_ids))

    def _first_token(self) -> None:
        if self.span is not None:
            self.span.event("first token")
        if self._cache is not None and not self._salted:
            self._cache.computed(self.worker_id, self.route.sequence_hashes)
        if self.apart is not None:
            self.apart.first_token()

    def cut_off(self) -> EngineError:
        """Why the stream ended although the answer did not."""
        if (reason := self.worker.gone) is not None:
            return EngineUnavailableError(f"worker {self.worker_id} is gone: {reason}")
        text = f"worker {self.worker_id} ended the stream without a finish reason"
        return EngineIncompleteError(text)

    def release(self, error: BaseException | None = None) -> None:
        """Give the load back; ``error`` is how it ended, if badly. Idempotent."""
        if not self._released:
            self._released = True
            if self.span is not None:
                self.span.end(error)
            self._load.release(self.ticket)
