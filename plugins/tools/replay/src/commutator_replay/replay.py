"""Runs a trace through the real routing code, over workers in virtual time. Pure."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from attrs import define, field, frozen

from commutator import RequestSummary, RouterConfig, RoutingPolicy
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import Role
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.queue import Place, RequestQueue
from commutator.routing.router import ModelRouter, Route
from commutator_replay.fleet import VirtualFleet, VirtualWorker
from commutator_replay.prefill import PrefillSide, ReplayDisagg, RunningPrefill
from commutator_replay.trace import TraceRequest
from commutator_replay.virtual import (
    BlocksGone,
    BlocksHeld,
    BlocksPulled,
    PrefillDone,
    RequestDone,
    TokensMade,
    VirtualEvent,
    VirtualRequest,
)
from commutator_replay.workforce import Planning, Span, Tick, Workforce


class DoesNotFitError(ValueError):
    """A worker can never hold a request of the trace, which is ``request``."""

    def __init__(self, request: TraceRequest, problem: Exception) -> None:
        self.request = request
        super().__init__(str(problem))


@frozen
class _Arrived:
    key: int
    traced: TraceRequest
    summary: RequestSummary
    hashes: Sequence[int]
    arrived_ns: int


@define
class _Flight:
    arrived: _Arrived
    worker_id: str
    request: VirtualRequest
    ticket: Ticket
    ahead_tokens: int
    """Prompt tokens that the worker had to compute before it."""
    uncached_tokens: int
    """Prompt tokens that the worker is expected to compute."""
    separate: bool
    cached_tokens: int = 0
    handed_over_tokens: int = 0
    prefilled_ns: int = 0
    first_ns: int = 0

    def since_arrival_s(self, time_ns: int) -> float:
        return (time_ns - self.arrived.arrived_ns) / 1e9


class Replay:
    """A replay while it runs."""

    def __init__(
        self,
        workers: Sequence[VirtualWorker],
        policy: RoutingPolicy,
        busy: BusyConfig,
        disagg: ReplayDisagg | None,
        planning: Planning | None,
        seed: int,
    ) -> None:
        self._fleet = VirtualFleet({w.worker_id: w.engine for w in workers}, self._apply)
        self._block_size = workers[0].engine.block_size
        self._load = InFlightLoad()
        rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
        indexer = KvIndexer(RouterConfig(kind="replay", block_size=self._block_size))
        self._index = indexer.index
        known = indexer if policy.uses_overlap else None
        self._pool = ModelRouter(policy, known, self._load, rng, self._block_size, strict=True)
        decoders = (worker.live for worker in workers if worker.role is not Role.PREFILL)
        self._decoders = tuple(decoders)
        prefillers = [worker for worker in workers if worker.role is Role.PREFILL]
        self._prefill: PrefillSide | None = None
        if disagg is not None and prefillers:
            self._prefill = PrefillSide(disagg, prefillers, indexer, self._load, seed)
        self._flights: dict[int, _Flight] = {}
        self._prefills: dict[int, RunningPrefill] = {}
        """Prompts at prefill workers, by the request's key."""
        self._held: deque[tuple[int, TraceRequest, int]] = deque()
        """Requests that wait for the first worker, each with its key and time of arrival."""
        self._busy = busy
        self._queue = RequestQueue(busy.max_queued_requests)
        self._queued: dict[Place, _Arrived] = {}
        """Requests that wait because every worker is busy."""
        self._trace_is_over = False
        self._serving = Role.BOTH if any(w.role is Role.BOTH for w in workers) else Role.DECODE
        self._begun = False
        self._workforce: Workforce | None = None
        if planning is not None:
            self._workforce = Workforce(planning, workers, self._fleet, self._load, self)
        self._tuning = None if planning is None else planning.tuning
        if self._tuning is not None:
            side = self._prefill
            arms, pool = (None, None) if side is None else (side.arms, side.pool)
            self._tuning.begin(self._pool, arms, pool)
        self.outcome = Outcome(tokens_given_up=0 if policy.uses_overlap else None)

    def arrive(self, key: int, traced: TraceRequest, now_ns: int) -> None:
        self._fleet.pass_time(now_ns)
        if self._workforce is not None and not self._begun:
            self._begun = True
            self._workforce.begin()
        if self._decoders:
            self._serve(key, traced, now_ns, counts=True)
            return
        self._held.append((key, traced, now_ns))
        if self._workforce is not None:
            self._workforce.arrived(self._serving, traced.input_length, traced.input_length)

    def _serve(self, key: int, traced: TraceRequest, arrived_ns: int, *, counts: bool) -> None:
        hashes, tokens = traced.blocks(self._block_size), traced.input_length
        summary = RequestSummary(
            request_id=str(key),
            model="model",
            prompt_tokens=tokens,
            max_tokens=traced.output_length,
        )
        one = _Arrived(key, traced, summary, hashes, arrived_ns)
        if self._tuning is not None:
            self._tuning.arrived(summary)
        route = None if self._queued else self._route(one)
        if route is not None:
            self._begin(one, route, counts=counts)
            return
        if self._workforce is not None and counts:
            self._workforce.arrived(self._serving, tokens, tokens)
        self._wait(one)

    def _route(self, one: _Arrived) -> Route | None:
        """None while every worker is busy."""
        if not self._busy.enabled:
            route: Route | None = self._pool.route(one.summary, one.hashes, self._decoders)
        else:
            route = self._pool.route_to_free(one.summary, one.hashes, self._decoders, self._busy)
        if route is not None:
            self.outcome.routing_s += route.routing_s
            if self.outcome.tokens_given_up is not None:
                self.outcome.tokens_given_up += route.given_up_blocks * self._block_size
        return route

    def _wait(self, queued: _Arrived) -> None:
        place = self._queue.place(queued.summary.priority)
        if not self._queue.enter(place):
            self._refused(queued)
            return
        self._queued[place] = queued
        self._fleet.in_step = True
        limit_ns = queued.arrived_ns + round(self._busy.max_queue_s * 1e9)
        now_ns = self._fleet.now_ns
        self._fleet.alarm(max(now_ns, limit_ns), partial(self._refuse, place))

    def _refuse(self, place: Place) -> None:
        if place in self._queued:
            self._refused(self._leave_queue(place))

    def _refused(self, queued: _Arrived) -> None:
        self.outcome.refused += 1
        if self._tuning is not None:
            self._tuning.ended(str(queued.key), None)

    def _leave_queue(self, place: Place) -> _Arrived:
        self._queue.leave(place)
        queued = self._queued.pop(place)
        self._fleet.in_step = bool(self._queued)
        return queued

    def _place_queued(self) -> None:
        """A worker's load fell, or one came: begin what waits, as far as they take it."""
        while (place := self._queue.first()) is not None:
            one = self._queued[place]
            route = self._route(one)
            if route is None:
                return
            self._leave_queue(place)
            self._begin(one, route, counts=False)

    def finish(self) -> None:
        """Let every request end."""
        self._trace_is_over = True
        self._fleet.pass_time(None)
        if self._workforce is not None:
            self._workforce.end(round(self.outcome.duration_s * 1e9))
            self.outcome.spans = self._workforce.spans
            self.outcome.ticks = self._workforce.ticks

    # ------------------------------------------------------- workers come and go

    def add(self, worker: VirtualWorker) -> None:
        """The worker gets requests from now on."""
        if worker.role is Role.PREFILL:
            assert self._prefill is not None
            self._prefill.workers.append(worker.live)
            self._place_waiting(self._prefill, self._fleet.now_ns)
            return
        self._decoders = (*self._decoders, worker.live)
        while self._held:
            key, traced, arrived_ns = self._held.popleft()
            self._serve(key, traced, arrived_ns, counts=False)
        self._place_queued()

    def drain(self, worker: VirtualWorker) -> None:
        """It gets no more."""
        if worker.role is Role.PREFILL:
            assert self._prefill is not None
            self._prefill.workers.remove(worker.live)
        else:
            self._decoders = tuple(one for one in self._decoders if one is not worker.live)

    def forget(self, worker: VirtualWorker) -> None:
        """It is gone, with its cache."""
        self._index.remove_worker(worker.worker_id)
        if worker.role is Role.PREFILL:
            assert self._prefill is not None
            self._prefill.pool.forget(worker.worker_id)
        else:
            self._pool.forget(worker.worker_id)

    def cached_blocks(self) -> Mapping[str, int]:
        """KV blocks that each worker caches."""
        return {name: sum(sizes) for name, sizes in self._index.blocks_by_worker().items()}

    def waiting_tokens(self) -> Mapping[Role, int]:
        """Prompt tokens of requests that wait for a worker of a role."""
        held = sum(traced.input_length for _, traced, _ in self._held)
        queued = sum(one.summary.prompt_tokens for one in self._queued.values())
        waiting = {self._serving: held + queued}
        if self._prefill is not None:
            waiting[Role.PREFILL] = self._prefill.waiting_tokens
        return waiting

    def is_over(self) -> bool:
        """Whether every request of the trace has been answered."""
        return self._trace_is_over and not (self._flights or self._held or self._queued)

    # ------------------------------------------------------------------ requests

    def _begin(self, one: _Arrived, route: Route, *, counts: bool) -> None:
        key, summary, hashes = one.key, one.summary, one.hashes
        side, now_ns = self._prefill, self._fleet.now_ns
        answer = side.decide(summary, hashes, route, now_ns) if side is not None else None
        wanted = answer is not None and answer.separate
        separate = wanted and side is not None and bool(side.workers)
        if answer is not None:
            reason = answer.reason if separate or not wanted else "no prefill worker"
            self.outcome.decisions[separate, reason] += 1
        worker_id, tokens = route.candidate.worker_id, summary.prompt_tokens
        ticket = self._load.dispatch(worker_id, tokens, self._block_size, route.overlap_tokens)
        self._flights[key] = _Flight(
            arrived=one,
            worker_id=worker_id,
            request=VirtualRequest(tokens, max(1, summary.max_tokens), hashes),
            ticket=ticket,
            ahead_tokens=route.candidate.load.active_prefill_tokens,
            uncached_tokens=ticket.prefill_tokens,
            separate=separate,
        )
        if self._workforce is not None and counts:
            here = 0 if separate else ticket.prefill_tokens
            self._workforce.arrived(self._serving, here, tokens)
            if wanted:
                self._workforce.arrived(Role.PREFILL, ticket.prefill_tokens, tokens)
        if side is None or not separate:
            self._submit(key)
            return
        self._load.expect(ticket, 0)
        if (prefill := side.place(summary, hashes, now_ns)) is not None:
            self._hand_over(key, prefill)
        elif (place := side.wait(summary, hashes, now_ns)) is not None:
            limit_ns = now_ns + round(side.busy.max_queue_s * 1e9)
            self._fleet.alarm(limit_ns, partial(self._stop_waiting, side, place, key))
        else:
            self._prefill_locally(key)

    def _submit(self, key: int) -> None:
        flight = self._flights[key]
        with _fitting(flight):
            self._fleet.submit(flight.worker_id, key, flight.request)
        self._begins(key, flight, flight.uncached_tokens)

    def _begins(self, key: int, flight: _Flight, prompt_tokens: int) -> None:
        """The worker that answers has the request; it computes ``prompt_tokens``."""
        if self._workforce is not None:
            now_ns = self._fleet.now_ns
            self._workforce.began(key, flight.worker_id, prompt_tokens, flight.ahead_tokens, now_ns)

    def _hand_over(self, key: int, prefill: RunningPrefill) -> None:
        flight = self._flights[key]
        self._prefills[key] = prefill
        with _fitting(flight):
            self._fleet.hand_over(prefill.ticket.worker_id, flight.worker_id, key, flight.request)
        self._begins(key, flight, 0)

    def _stop_waiting(self, side: PrefillSide, place: Place, key: int) -> None:
        if side.leave(place):
            self._prefill_locally(key)

    def _prefill_locally(self, key: int) -> None:
        """Prefill at the decode worker, because no prefill worker took the prompt."""
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
            case PrefillDone() if self._is_prefill(worker_id, event.key):
                self._prefilled(event)
            case PrefillDone():
                self._first_token(event)
            case RequestDone() if self._is_prefill(worker_id, event.key):
                self._prefill_ends(event)
            case RequestDone():
                self._finish(event.key, event.time_ns)

    def _is_prefill(self, worker_id: str, key: int) -> bool:
        prefill = self._prefills.get(key)
        return prefill is not None and prefill.ticket.worker_id == worker_id

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
        if self._workforce is not None:
            ttft_s = flight.since_arrival_s(event.time_ns)
            self._workforce.first_token(event.key, flight.worker_id, ttft_s, event.time_ns)
        if self._prefill is not None:
            self._measure(flight, self._prefill)
        self._load.progress(flight.ticket, 1)
        self._place_queued()
        computed = flight.request.prompt_tokens - event.cached_tokens - flight.handed_over_tokens
        self.outcome.computed_tokens[flight.worker_id] += computed

    def _measure(self, flight: _Flight, side: PrefillSide) -> None:
        if flight.prefilled_ns:
            took_s = (flight.first_ns - flight.prefilled_ns) / 1e9
            side.handed_over(flight.uncached_tokens, took_s)
        elif not flight.separate:
            took_s = flight.since_arrival_s(flight.first_ns)
            side.meter.local_prefill.add(flight.ahead_tokens + flight.uncached_tokens, took_s)

    def _prefill_ends(self, event: RequestDone) -> None:
        side = self._prefill
        assert side is not None
        prefill = self._prefills.pop(event.key)
        side.ended(prefill, event.time_ns)
        if self._workforce is not None:
            tokens = prefill.ahead_tokens + prefill.ticket.prefill_tokens
            worker_id = prefill.ticket.worker_id
            self._workforce.prefilled(worker_id, tokens, prefill.began_ns, event.time_ns)
        self._place_waiting(side, event.time_ns)

    def _place_waiting(self, side: PrefillSide, now_ns: int) -> None:
        while (placed := side.next_placed(now_ns)) is not None:
            self._hand_over(*placed)

    def _finish(self, key: int, now_ns: int) -> None:
        flight = self._flights.pop(key)
        self._load.release(flight.ticket)
        done = Finished(
            worker_id=flight.worker_id,
            prompt_tokens=flight.request.prompt_tokens,
            output_tokens=flight.request.output_tokens,
            cached_tokens=flight.cached_tokens,
            ttft_s=flight.since_arrival_s(flight.first_ns),
            duration_s=flight.since_arrival_s(now_ns),
        )
        self.outcome.finished.append(done)
        if self._workforce is not None:
            self._workforce.answered(key, flight.worker_id, done.output_tokens, done.itl_s, now_ns)
        self.outcome.duration_s = max(self.outcome.duration_s, now_ns / 1e9)
        self.outcome.handed_over_tokens += flight.handed_over_tokens
        if self._tuning is not None:
            self._tuning.ended(str(key), done.ttft_s, done.itl_s)
        self._place_queued()


@contextmanager
def _fitting(flight: _Flight) -> Iterator[None]:
    """Raises DoesNotFitError when a worker can never hold the request."""
    try:
        yield
    except DoesNotFitError:
        raise  # another request, which could begin because of this one
    except ValueError as error:
        raise DoesNotFitError(flight.arrived.traced, error) from error


def replay(
    trace: Iterable[TraceRequest],
    workers: Sequence[VirtualWorker],
    policy: RoutingPolicy,
    disagg: ReplayDisagg | None = None,
    *,
    busy: BusyConfig = BusyConfig(),  # noqa: B008 - frozen
    planning: Planning | None = None,
    seed: int = 0,
) -> Outcome:
    """Replay ``trace`` over fresh ``workers``.

    With ``planning``, these are the first ones, at least one of each role; a planner starts and
    drains others.

    A request waits, first come first served, while every worker is ``busy``, and is refused when
    the queue is full or it waited too long.

    With ``disagg``, prompts may be computed by the workers of the role prefill. Deterministic:
    equal arguments give equal outcomes. Raises ValueError when the engines' blocks are not of one
    size that is a part or a multiple of the trace's, DoesNotFitError for a request longer than a
    worker's memory.
    """
    trace = list(trace)
    sizes = {worker.engine.block_size for worker in workers}
    for tokens in sorted({one.block_tokens for one in trace}):
        if len(sizes) > 1 or (tokens % min(sizes) and min(sizes) % tokens):
            found = ", ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"the trace's blocks have {tokens} tokens and the engines' {found}: "
                f"set block_size: {tokens}, or the same part or multiple of it everywhere"
            )
    running = Replay(workers, policy, busy, disagg, planning, seed)
    for key, request in enumerate(trace):
        running.arrive(key, request, round(request.timestamp * 1e6))
    running.finish()
    return running.outcome


@define
class Finished:
    """One request of the trace, with its times in seconds."""

    worker_id: str
    """The decode worker."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float
    duration_s: float

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens."""
        return (self.duration_s - self.ttft_s) / max(1, self.output_tokens - 1)


@define
class Outcome:
    """Everything that a report is made from."""

    finished: list[Finished] = field(factory=list)
    intervals: dict[int, int] = field(factory=dict)
    """Inter-token latency in ns to the number of tokens that came with it."""
    computed_tokens: Counter[str] = field(factory=Counter)
    """Prompt tokens computed, by worker."""
    tokens_given_up: int | None = None
    """Prompt tokens that another worker held beyond the chosen one's; None: no overlaps used."""
    decisions: Counter[tuple[bool, str]] = field(factory=Counter)
    """Requests by whether they were disaggregated, and why; empty without prefill workers."""
    not_taken: int = 0
    """Requests to be disaggregated that no prefill worker took in time."""
    handed_over_tokens: int = 0
    refused: int = 0
    """Requests that found the queue full, or waited too long, because every worker was busy."""
    duration_s: float = 0.0
    spans: list[Span] = field(factory=list)
    """The lives of the workers; empty without a planner."""
    ticks: list[Tick] = field(factory=list)
    """The plans; empty without a planner."""
    routing_s: float = field(default=0.0, eq=False)
    """Measured time of all routing decisions, in seconds."""
