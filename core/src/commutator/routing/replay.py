"""Runs a trace through the real routing code, over workers in virtual time. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from commutator.engine.virtual import (
    BlocksGone,
    BlocksHeld,
    PrefillDone,
    RequestDone,
    TokensMade,
    VirtualEngine,
    VirtualEvent,
    VirtualRequest,
)
from commutator.routing.contract import RoutingPolicy
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.pool import ModelPool
from commutator.routing.prefix_index import PrefixIndex
from commutator.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from commutator.routing.virtual_worker import VirtualWorker
from commutator.types import GenerateRequest, RequestSummary

__all__ = ["Finished", "Outcome", "replay"]


@define
class Finished:
    """One request of the trace, with its times in seconds."""

    worker_id: str
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
    """What a replay measured."""

    finished: list[Finished] = field(factory=list)
    intervals: dict[int, int] = field(factory=dict)
    """Inter-token latency in ns to the number of tokens that came with it."""
    tokens_given_up: int | None = None
    """Prompt tokens that another worker held beyond the chosen one's: the price of balance.

    None for a policy that is not told what workers hold.
    """
    duration_s: float = 0.0


class _Cache:
    """The prefix index as the pool asks it; events reach it at once in virtual time."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        raise NotImplementedError("a trace brings its own block hashes")

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        return self._index.match(hashes)


@define
class _Flight:
    worker_id: str
    request: TraceRequest
    arrived_ns: int
    ticket: Ticket
    cached_tokens: int = 0
    first_ns: int = 0


class _Replay:
    def __init__(
        self,
        workers: Sequence[VirtualWorker],
        policy: RoutingPolicy,
        seed: int,
    ) -> None:
        self._workers = {worker.worker_id: worker for worker in workers}
        self._index = PrefixIndex(TRACE_BLOCK_TOKENS)
        self._load = InFlightLoad()
        rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
        cache = _Cache(self._index) if policy.uses_overlap else None
        self._pool = ModelPool(policy, cache, self._load, rng, TRACE_BLOCK_TOKENS, strict=True)
        self._flights: dict[int, _Flight] = {}
        self.outcome = Outcome(tokens_given_up=0 if policy.uses_overlap else None)

    def arrive(self, key: int, request: TraceRequest, now_ns: int) -> None:
        self.pass_time(now_ns)
        hashes = request.full_blocks
        summary = RequestSummary(str(key), "model", request.input_length, request.output_length)
        live = [worker.live for worker in self._workers.values()]
        route = self._pool.route(summary, hashes, live)
        if self.outcome.tokens_given_up is not None:
            missed = route.best_overlap_blocks - route.candidate.overlap.blocks
            self.outcome.tokens_given_up += missed * TRACE_BLOCK_TOKENS
        worker_id = route.candidate.worker_id
        ticket = self._load.dispatch(
            worker_id, request.input_length, TRACE_BLOCK_TOKENS, route.overlap_tokens
        )
        self._flights[key] = _Flight(worker_id, request, now_ns, ticket)
        self._workers[worker_id].engine.submit(
            key, VirtualRequest(request.input_length, max(1, request.output_length), hashes)
        )

    def pass_time(self, until_ns: int | None) -> None:
        for worker_id, worker in self._workers.items():
            for event in worker.engine.advance(until_ns):
                self._apply(worker_id, event)

    def _apply(self, worker_id: str, event: VirtualEvent) -> None:
        match event:
            case TokensMade():
                counts = self.outcome.intervals
                counts[event.interval_ns] = counts.get(event.interval_ns, 0) + event.tokens
            case BlocksHeld():
                self._index.store(worker_id, event.block_hashes, tier=event.tier)
            case BlocksGone():
                self._index.remove(worker_id, event.block_hashes, tier=event.tier)
            case PrefillDone():
                flight = self._flights[event.key]
                flight.cached_tokens, flight.first_ns = event.cached_tokens, event.time_ns
                self._load.progress(flight.ticket, 1)
            case RequestDone():
                self._finish(self._flights.pop(event.key), event.time_ns)

    def _finish(self, flight: _Flight, now_ns: int) -> None:
        self._load.release(flight.ticket)
        self.outcome.duration_s = max(self.outcome.duration_s, now_ns / 1e9)
        self.outcome.finished.append(
            Finished(
                worker_id=flight.worker_id,
                prompt_tokens=flight.request.input_length,
                output_tokens=max(1, flight.request.output_length),
                cached_tokens=flight.cached_tokens,
                ttft_s=(flight.first_ns - flight.arrived_ns) / 1e9,
                duration_s=(now_ns - flight.arrived_ns) / 1e9,
            )
        )


def replay(
    trace: Iterable[TraceRequest],
    make_engine: Callable[[], VirtualEngine],
    workers: int,
    policy: RoutingPolicy,
    *,
    seed: int = 0,
    speed: float = 1.0,
) -> Outcome:
    """Replay ``trace``, ``speed`` times as fast as it was recorded, over ``workers`` engines.

    Deterministic: equal arguments give equal outcomes. Raises ValueError when the engine's blocks
    are not the trace's, or a request is longer than its memory.
    """
    fleet = [VirtualWorker.make(f"worker-{i:03}", make_engine()) for i in range(workers)]
    if (size := fleet[0].engine.block_size) != TRACE_BLOCK_TOKENS:
        raise ValueError(
            f"the trace's blocks have {TRACE_BLOCK_TOKENS} tokens and the engine's {size}: "
            f"set block_size: {TRACE_BLOCK_TOKENS} in the engine's entry"
        )
    running = _Replay(fleet, policy, seed)
    for key, request in enumerate(trace):
        running.arrive(key, request, round(request.timestamp * 1e6 / speed))
    running.pass_time(None)
    return running.outcome
