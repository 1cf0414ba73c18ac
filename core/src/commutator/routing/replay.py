"""Runs a trace through the real routing code, over workers in virtual time. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from attrs import define

from commutator.engine.virtual import (
    BlocksGone,
    BlocksHeld,
    BlocksPulled,
    PrefillDone,
    RequestDone,
    TokensMade,
    VirtualEvent,
    VirtualRequest,
)
from commutator.routing.contract import RoutingPolicy
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.pool import ModelPool
from commutator.routing.prefix_index import PrefixIndex
from commutator.routing.replay_outcome import Finished, Outcome
from commutator.routing.replay_prefill import PrefillLeg, PrefillSide, ReplayDisagg
from commutator.routing.request_queue import Place
from commutator.routing.route import Route
from commutator.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from commutator.routing.virtual_fleet import VirtualFleet
from commutator.routing.virtual_worker import VirtualWorker
from commutator.types import GenerateRequest, RequestSummary, Role

__all__ = ["DoesNotFitError", "replay"]


class DoesNotFitError(ValueError):
    """A worker can never hold what it was sent. ``request`` is the one of the trace."""

    def __init__(self, request: TraceRequest, problem: Exception) -> None:
        self.request = request
        super().__init__(str(problem))


class _Cache:
    """The prefix index as the pools ask it; events reach it at once in virtual time."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        raise NotImplementedError("a trace brings its own block hashes")

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        return self._index.match(hashes)

    @property
    def exact(self) -> frozenset[str]:
        return frozenset()


@define
class _Flight:
    worker_id: str
    traced: TraceRequest
    request: VirtualRequest
    arrived_ns: int
    ticket: Ticket
    ahead_tokens: int
    """What the worker had to compute before it."""
    uncached_tokens: int
    """What it is thought to lack of the prompt."""
    separate: bool
    cached_tokens: int = 0
    handed_over_tokens: int = 0
    prefilled_ns: int = 0
    first_ns: int = 0


class _Replay:
    def __init__(
        self,
        workers: Sequence[VirtualWorker],
        policy: RoutingPolicy,
        disagg: ReplayDisagg | None,
        seed: int,
    ) -> None:
        self._fleet = VirtualFleet({w.worker_id: w.engine for w in workers}, self._apply)
        self._block_size = workers[0].engine.block_size
        self._index = PrefixIndex(self._block_size)
        self._load = InFlightLoad()
        rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
        cache = _Cache(self._index)
        known = cache if policy.uses_overlap else None
        self._pool = ModelPool(policy, known, self._load, rng, self._block_size, strict=True)
        self._decoders = [worker.live for worker in workers if worker.role is not Role.PREFILL]
        prefillers = [worker for worker in workers if worker.role is Role.PREFILL]
        self._prefill: PrefillSide | None = None
        if disagg is not None and prefillers:
            self._prefill = PrefillSide(disagg, prefillers, cache, self._load, seed)
        self._flights: dict[int, _Flight] = {}
        self._prefills: dict[int, PrefillLeg] = {}
        """Of the prompts that prefill workers compute."""
        self.outcome = Outcome(tokens_given_up=0 if policy.uses_overlap else None)

    def arrive(self, key: int, traced: TraceRequest, now_ns: int) -> None:
        self._fleet.pass_time(now_ns)
        hashes, tokens = traced.blocks(self._block_size), traced.input_length
        summary = RequestSummary(str(key), "model", tokens, traced.output_length)
        route = self._pool.route(summary, hashes, self._decoders)
        if self.outcome.tokens_given_up is not None:
            missed = route.best_overlap_blocks - route.candidate.overlap.blocks
            self.outcome.tokens_given_up += missed * self._block_size
        self._begin(key, traced, summary, hashes, route)

    def finish(self) -> None:
        """Let everybody end."""
        self._fleet.pass_time(None)

    def _begin(
        self,
        key: int,
        traced: TraceRequest,
        summary: RequestSummary,
        hashes: Sequence[int],
        route: Route,
    ) -> None:
        side, now_ns = self._prefill, self._fleet.now_ns
        answer = side.decide(summary, hashes, route, now_ns) if side is not None else None
        separate = answer is not None and answer.separate
        if answer is not None:
            self.outcome.decisions[answer.separate, answer.reason] += 1
        worker_id, tokens = route.candidate.worker_id, summary.prompt_tokens
        ticket = self._load.dispatch(worker_id, tokens, self._block_size, route.overlap_tokens)
        self._flights[key] = _Flight(
            worker_id=worker_id,
            traced=traced,
            request=VirtualRequest(tokens, max(1, summary.max_tokens), hashes),
            arrived_ns=now_ns,
            ticket=ticket,
            ahead_tokens=route.candidate.load.active_prefill_tokens,
            uncached_tokens=ticket.prefill_tokens,
            separate=separate,
        )
        if side is None or not separate:
            self._submit(key)
            return
        self._load.expect(ticket, 0)
        if (leg := side.place(summary, hashes, now_ns)) is not None:
            self._hand_over(key, leg)
        elif (place := side.wait(summary, hashes, now_ns)) is not None:
            limit_ns = now_ns + round(side.max_queue_s * 1e9)
            self._fleet.alarm(limit_ns, partial(self._stop_waiting, side, place, key))
        else:
            self._prefill_locally(key)

    def _submit(self, key: int) -> None:
        flight = self._flights[key]
        with _fitting(flight):
            self._fleet.submit(flight.worker_id, key, flight.request)

    def _hand_over(self, key: int, leg: PrefillLeg) -> None:
        flight = self._flights[key]
        self._prefills[key] = leg
        with _fitting(flight):
            self._fleet.hand_over(leg.ticket.worker_id, flight.worker_id, key, flight.request)

    def _stop_waiting(self, side: PrefillSide, place: Place, key: int) -> None:
        if side.leave(place):
            self._prefill_locally(key)

    def _prefill_locally(self, key: int) -> None:
        """No prefill worker takes it after all."""
        flight = self._flights[key]
        self.outcome.not_taken += 1
        self._load.expect(flight.ticket, flight.uncached_tokens)
        self._submit(key)

    def _apply(self, worker_id: str, event: VirtualEvent) -> None:
        match event:
            case TokensMade():
                counts = self.outcome.intervals
                counts[event.interval_ns] = counts.get(event.interval_ns, 0) + event.tokens
            case BlocksHeld():
                self._index.store(worker_id, event.block_hashes, tier=event.tier)
            case BlocksGone():
                self._index.remove(worker_id, event.block_hashes, tier=event.tier)
            case BlocksPulled():
                self._flights[event.key].handed_over_tokens = event.blocks * self._block_size
            case PrefillDone() if self._is_prefill_leg(worker_id, event.key):
                self._prefilled(event)
            case PrefillDone():
                self._first_token(event)
            case RequestDone() if self._is_prefill_leg(worker_id, event.key):
                self._prefill_ends(event)
            case RequestDone():
                self._finish(self._flights.pop(event.key), event.time_ns)

    def _is_prefill_leg(self, worker_id: str, key: int) -> bool:
        leg = self._prefills.get(key)
        return leg is not None and leg.ticket.worker_id == worker_id

    def _prefilled(self, event: PrefillDone) -> None:
        ticket = self._prefills[event.key].ticket
        computed = ticket.prompt_tokens - event.cached_tokens
        self.outcome.computed_tokens[ticket.worker_id] += computed
        if (flight := self._flights.get(event.key)) is not None:
            flight.cached_tokens = max(flight.cached_tokens, event.cached_tokens)
            flight.prefilled_ns = event.time_ns

    def _first_token(self, event: PrefillDone) -> None:
        flight = self._flights[event.key]
        flight.first_ns = event.time_ns
        flight.cached_tokens = max(flight.cached_tokens, event.cached_tokens)
        if self._prefill is not None:
            self._measure(flight, self._prefill)
        self._load.progress(flight.ticket, 1)
        computed = flight.request.prompt_tokens - event.cached_tokens - flight.handed_over_tokens
        self.outcome.computed_tokens[flight.worker_id] += computed

    def _measure(self, flight: _Flight, side: PrefillSide) -> None:
        if flight.prefilled_ns:
            took_s = (flight.first_ns - flight.prefilled_ns) / 1e9
            side.handed_over(flight.uncached_tokens, took_s)
        elif not flight.separate:
            took_s = (flight.first_ns - flight.arrived_ns) / 1e9
            side.meter.local_prefill.add(flight.ahead_tokens + flight.uncached_tokens, took_s)

    def _prefill_ends(self, event: RequestDone) -> None:
        side = self._prefill
        assert side is not None
        side.ended(self._prefills.pop(event.key), event.time_ns)
        while (placed := side.next_placed(event.time_ns)) is not None:
            self._hand_over(*placed)

    def _finish(self, flight: _Flight, now_ns: int) -> None:
        self._load.release(flight.ticket)
        self.outcome.duration_s = max(self.outcome.duration_s, now_ns / 1e9)
        self.outcome.handed_over_tokens += flight.handed_over_tokens
        self.outcome.finished.append(
            Finished(
                worker_id=flight.worker_id,
                prompt_tokens=flight.request.prompt_tokens,
                output_tokens=flight.request.output_tokens,
                cached_tokens=flight.cached_tokens,
                ttft_s=(flight.first_ns - flight.arrived_ns) / 1e9,
                duration_s=(now_ns - flight.arrived_ns) / 1e9,
            )
        )


@contextmanager
def _fitting(flight: _Flight) -> Iterator[None]:
    """Names the request when a worker can never hold it."""
    try:
        yield
    except DoesNotFitError:
        raise  # of another one, which this one let in
    except ValueError as error:
        raise DoesNotFitError(flight.traced, error) from error


def replay(
    trace: Iterable[TraceRequest],
    workers: Sequence[VirtualWorker],
    policy: RoutingPolicy,
    disagg: ReplayDisagg | None = None,
    *,
    seed: int = 0,
) -> Outcome:
    """Replay ``trace`` over fresh ``workers``.

    With ``disagg``, prompts may be computed by the workers of the role prefill. Deterministic:
    equal arguments give equal outcomes. Raises ValueError when the engines' blocks are not of one
    size that divides the trace's, DoesNotFitError for a request longer than a worker's memory.
    """
    sizes = {worker.engine.block_size for worker in workers}
    if len(sizes) > 1 or TRACE_BLOCK_TOKENS % min(sizes):
        found = ", ".join(map(str, sorted(sizes)))
        raise ValueError(
            f"the trace's blocks have {TRACE_BLOCK_TOKENS} tokens and the engines' {found}: "
            f"set block_size: {TRACE_BLOCK_TOKENS}, or the same part of it everywhere"
        )
    running = _Replay(workers, policy, disagg, seed)
    for key, request in enumerate(trace):
        running.arrive(key, request, round(request.timestamp * 1e6))
    running.finish()
    return running.outcome
