"""The prefill workers of a replay: which requests go there, and which wait for one. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import define, frozen

from commutator.config.model import BusyConfig
from commutator.routing.contract import RoutingPolicy
from commutator.routing.disagg import DisaggAnswer, DisaggPolicy, DisaggQuestion
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.pool import KnownBlocks, ModelPool
from commutator.routing.request_queue import Place, RequestQueue
from commutator.routing.route import Route
from commutator.routing.speeds import SpeedMeter
from commutator.routing.virtual_worker import VirtualWorker
from commutator.types import RequestSummary

__all__ = ["PrefillLeg", "PrefillSide", "ReplayDisagg"]


@frozen
class ReplayDisagg:
    """What a replay needs to know of `disaggregation`; both policies are its own."""

    policy: DisaggPolicy
    router: RoutingPolicy
    busy: BusyConfig = BusyConfig()


@frozen
class PrefillLeg:
    """A prompt at a prefill worker."""

    ticket: Ticket
    ahead_tokens: int
    """What the worker had to compute before it."""
    began_ns: int


@define
class _Waiting:
    summary: RequestSummary
    hashes: Sequence[int]
    since_ns: int


class PrefillSide:
    """Asks the policy about each request, and finds a prefill worker or a place in the queue."""

    def __init__(
        self,
        disagg: ReplayDisagg,
        workers: Sequence[VirtualWorker],
        cache: KnownBlocks,
        load: InFlightLoad,
        seed: int,
    ) -> None:
        self._disagg = disagg
        self._workers = [worker.live for worker in workers]
        self._info = self._workers[0].record.info
        self._token_bytes = workers[0].engine.token_bytes or 0
        self.meter = SpeedMeter()
        self._load = load
        rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
        known = cache if disagg.router.uses_overlap else None
        self._pool = ModelPool(disagg.router, known, load, rng, self._info.block_size, strict=True)
        self._queue = RequestQueue(disagg.busy.max_queued_requests)
        self._waiting: dict[Place, _Waiting] = {}

    @property
    def max_queue_s(self) -> float:
        """How long a prompt may wait."""
        return self._disagg.busy.max_queue_s

    def decide(
        self, summary: RequestSummary, hashes: Sequence[int], decode: Route, now_ns: int
    ) -> DisaggAnswer:
        """Whether the request, whose decode worker is chosen, is prefilled elsewhere."""
        candidates = self._pool.candidates(hashes, self._workers)
        first = self._queue.first()
        question = DisaggQuestion(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=decode.overlap_tokens,
            decode_load=decode.candidate.load,
            prefill_loads={candidate.worker_id: candidate.load for candidate in candidates},
            prefill_cached_tokens=max(one.overlap.blocks for one in candidates)
            * self._info.block_size,
            queued_prefills=len(self._queue),
            queue_age_s=(now_ns - self._waiting[first].since_ns) / 1e9 if first else 0.0,
            token_bytes=self._token_bytes,
            speeds=self.meter.speeds(),
        )
        return self._disagg.policy.decide(question)

    def place(
        self, summary: RequestSummary, hashes: Sequence[int], now_ns: int
    ) -> PrefillLeg | None:
        """Send a prompt to a worker; None while all are busy."""
        route = self._pool.route_to_free(summary, hashes, self._workers, self._disagg.busy)
        if route is None:
            return None
        one = route.candidate
        ticket = self._load.dispatch(
            one.worker_id, summary.prompt_tokens, self._info.block_size, route.overlap_tokens
        )
        return PrefillLeg(ticket, one.load.active_prefill_tokens, now_ns)

    def ended(self, leg: PrefillLeg, now_ns: int) -> None:
        """Its worker has computed the prompt."""
        self._load.release(leg.ticket)
        tokens = leg.ahead_tokens + leg.ticket.prefill_tokens
        self.meter.prefill.add(tokens, (now_ns - leg.began_ns) / 1e9)

    def handed_over(self, tokens: int, seconds: float) -> None:
        """So long after the end of its prefill a prompt had its first token."""
        self.meter.handover.add(tokens * self._token_bytes, seconds)

    def wait(self, summary: RequestSummary, hashes: Sequence[int], now_ns: int) -> Place | None:
        """A place in the queue; None when it is full."""
        place = self._queue.place(summary.priority)
        if not self._queue.enter(place):
            return None
        self._waiting[place] = _Waiting(summary, hashes, now_ns)
        return place

    def next_placed(self, now_ns: int) -> tuple[int, PrefillLeg] | None:
        """Who is next in the queue, if a worker is free for it: its key, and its leg."""
        if (place := self._queue.first()) is None:
            return None
        waiting = self._waiting[place]
        leg = self.place(waiting.summary, waiting.hashes, now_ns)
        if leg is None:
            return None
        self.leave(place)
        return int(waiting.summary.request_id), leg

    def leave(self, place: Place) -> bool:
        """Wait no longer. False when it did not."""
        self._waiting.pop(place, None)
        return self._queue.leave(place)
