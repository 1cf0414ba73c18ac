"""The prefill workers of a replay, and the requests that wait for one. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import define, frozen

from commutator import (
    DisaggAnswer,
    DisaggPolicy,
    DisaggQuestion,
    RequestSummary,
    RoutingPolicy,
    WorkerLoad,
)
from commutator.contract.routing import BusyConfig
from commutator.routing.disagg.prefill_pool import SpeedMeter
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.queue import Place, RequestQueue
from commutator.routing.router import Arms, ModelRouter, Route
from commutator_replay.fleet import VirtualWorker

_ONE_IDLE = {"worker": WorkerLoad()}


@frozen
class ReplayDisagg:
    """The policies of `disaggregation` and its busy thresholds."""

    policy: DisaggPolicy
    router: RoutingPolicy
    busy: BusyConfig = BusyConfig()


@frozen
class RunningPrefill:
    """A prompt at a prefill worker."""

    ticket: Ticket
    ahead_tokens: int
    """Prompt tokens that the worker had to compute before it."""
    began_ns: int


@define
class _Waiting:
    summary: RequestSummary
    hashes: Sequence[int]
    since_ns: int


class PrefillSide:
    """Asks the policy about each request; finds a prefill worker or a place in the queue."""

    def __init__(
        self,
        disagg: ReplayDisagg,
        workers: Sequence[VirtualWorker],
        indexer: KvIndexer,
        load: InFlightLoad,
        seed: int,
    ) -> None:
        self.busy = disagg.busy
        self.arms = Arms(disagg.policy)
        self.workers = [worker.live for worker in workers]
        """Those that take prompts."""
        self._info = self.workers[0].record.info
        self._token_bytes = workers[0].engine.token_bytes or 0
        self.meter = SpeedMeter()
        self._load = load
        rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
        known = indexer if disagg.router.uses_overlap else None
        self.pool = ModelRouter(disagg.router, known, load, rng, self._info.block_size, strict=True)
        self._queue = RequestQueue(disagg.busy.max_queued_requests)
        self._waiting: dict[Place, _Waiting] = {}

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return sum(one.summary.prompt_tokens for one in self._waiting.values())

    def decide(
        self, summary: RequestSummary, hashes: Sequence[int], decode: Route, now_ns: int
    ) -> DisaggAnswer:
        """Whether the request, whose decode worker is chosen, is prefilled elsewhere.

        Without a prefill worker, as if there were an idle one: that is the demand for it.
        """
        candidates = self.pool.candidates(hashes, self.workers)
        first = self._queue.first()
        question = DisaggQuestion(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=decode.overlap_tokens,
            decode_load=decode.candidate.load,
            prefill_loads={one.worker_id: one.load for one in candidates} or _ONE_IDLE,
            prefill_cached_tokens=max((one.overlap.blocks for one in candidates), default=0)
            * self._info.block_size,
            queued_prefills=len(self._queue),
            queue_age_s=(now_ns - self._waiting[first].since_ns) / 1e9 if first else 0.0,
            token_bytes=self._token_bytes,
            speeds=self.meter.speeds(),
        )
        return self.arms.of(summary).decide(question)

    def place(
        self, summary: RequestSummary, hashes: Sequence[int], now_ns: int
    ) -> RunningPrefill | None:
        """Send a prompt to a worker; None while all are busy, or there is none."""
        if not self.workers:
            return None
        route = self.pool.route_to_free(summary, hashes, self.workers, self.busy)
        if route is None:
            return None
        one = route.candidate
        ticket = self._load.dispatch(
            one.worker_id, summary.prompt_tokens, self._info.block_size, route.overlap_tokens
        )
        return RunningPrefill(ticket, one.load.active_prefill_tokens, now_ns)

    def ended(self, prefill: RunningPrefill, now_ns: int) -> None:
        """The worker has computed the prompt."""
        self._load.release(prefill.ticket)
        tokens = prefill.ahead_tokens + prefill.ticket.prefill_tokens
        self.meter.prefill.add(tokens, (now_ns - prefill.began_ns) / 1e9)

    def handed_over(self, tokens: int, seconds: float) -> None:
        """Measure a hand-over: ``seconds`` from the end of the prefill to the first token."""
        self.meter.handover.add(tokens * self._token_bytes, seconds)

    def wait(self, summary: RequestSummary, hashes: Sequence[int], now_ns: int) -> Place | None:
        """A place in the queue; None when it is full."""
        place = self._queue.place(summary.priority)
        if not self._queue.enter(place):
            return None
        self._waiting[place] = _Waiting(summary, hashes, now_ns)
        return place

    def next_placed(self, now_ns: int) -> tuple[int, RunningPrefill] | None:
        """The next request of the queue, by its key, and its prefill; None if all are busy."""
        if (place := self._queue.first()) is None:
            return None
        waiting = self._waiting[place]
        prefill = self.place(waiting.summary, waiting.hashes, now_ns)
        if prefill is None:
            return None
        self.leave(place)
        return int(waiting.summary.request_id), prefill

    def leave(self, place: Place) -> bool:
        """Stop waiting. False if the request did not wait."""
        self._waiting.pop(place, None)
        return self._queue.leave(place)
