"""The workers of one model: who could serve a request, and whom the policy picks."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from attrs import asdict, frozen

from commutator.errors import RoutingError
from commutator.routing.contract import (
    Candidate,
    Decision,
    RouteRequest,
    RoutingPolicy,
    candidate_id,
)
from commutator.routing.load import InFlightLoad
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.view import LiveWorker
from commutator.types import GenerateRequest, RequestSummary

__all__ = ["KnownBlocks", "ModelPool", "Route", "RouteFacts"]

_NOTHING = Overlap()


@frozen
class RouteFacts:
    """One decision in numbers, for metrics."""

    routing_s: float
    overlap_blocks: int
    """Of the prompt's blocks, those that the chosen worker is thought to hold."""
    best_overlap_blocks: int
    """The same of the worker that holds most."""


@frozen(eq=False)
class Route:
    """A decision, with everything it was based on."""

    decision: Decision
    candidate: Candidate
    worker: LiveWorker
    candidates: Sequence[Candidate]
    sequence_hashes: Sequence[int]
    block_size: int
    routing_s: float

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that the chosen worker is thought to hold."""
        return self.candidate.overlap.blocks * self.block_size

    @property
    def best_overlap_blocks(self) -> int:
        """The longest cached prefix that any candidate had."""
        return max(candidate.overlap.blocks for candidate in self.candidates)

    @property
    def facts(self) -> RouteFacts:
        overlap = self.candidate.overlap.blocks
        return RouteFacts(self.routing_s, overlap, self.best_overlap_blocks)

    def explain(self) -> dict[str, Any]:
        """For people: every candidate with its overlap, load and scores, and why one won."""
        return {
            "worker_id": self.decision.worker_id,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "overlap_blocks": self.candidate.overlap.blocks,
            "best_overlap_blocks": self.best_overlap_blocks,
            "candidates": [
                {
                    "worker_id": candidate.worker_id,
                    "overlap_blocks": asdict(candidate.overlap),
                    "load": asdict(candidate.load),
                    "scores": dict(self.decision.scores.get(candidate.worker_id, {})),
                }
                for candidate in self.candidates
            ],
        }


class KnownBlocks(Protocol):
    """What is known of the workers' caches; see ``commutator.routing.cache_view.CacheView``."""

    def hashes(self, request: GenerateRequest) -> Sequence[int]: ...

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]: ...


CacheT = TypeVar("CacheT", bound=KnownBlocks)


class ModelPool(Generic[CacheT]):
    """One model's policy, and what it is told."""

    def __init__(
        self,
        policy: RoutingPolicy,
        cache: CacheT | None,
        load: InFlightLoad,
        rng: random.Random,
        block_size: int,
    ) -> None:
        """``cache`` is None when the policy does not look at overlaps."""
        self.policy = policy
        self.cache = cache
        self._load = load
        self._rng = rng
        self._block_size = block_size

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        """The prompt's sequence hashes, or none when nobody needs them."""
        return self.cache.hashes(request) if self.cache is not None else ()

    def route(
        self, summary: RequestSummary, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> Route:
        """Ask the policy. Raises RoutingError when it picks somebody who is no candidate."""
        started_s = time.perf_counter()
        matches = self.cache.match(hashes) if self.cache is not None and hashes else {}
        pairs = [
            (self._candidate(worker, rank, matches), worker)
            for worker in workers
            for rank in range(worker.record.info.data_parallel_size)
        ]
        request = RouteRequest(
            request_id=summary.request_id,
            model=summary.model,
            prompt_tokens=summary.prompt_tokens,
            max_tokens=summary.max_tokens,
            session_id=summary.session_id,
            priority=summary.priority,
            block_size=self._block_size,
        )
        candidates = [candidate for candidate, _ in pairs]
        decision = self.policy.pick(request, candidates, self._rng)
        for candidate, worker in pairs:
            if candidate.worker_id == decision.worker_id:
                taken_s = time.perf_counter() - started_s
                return Route(
                    decision, candidate, worker, candidates, hashes, self._block_size, taken_s
                )
        raise RoutingError(
            f"policy {decision.policy} picked {decision.worker_id}, which is no candidate"
        )

    def _candidate(
        self, worker: LiveWorker, rank: int, matches: Mapping[WorkerRank, Overlap]
    ) -> Candidate:
        record = worker.record
        overlap = matches.get(WorkerRank(record.worker_id, rank), _NOTHING)
        return Candidate(record, self._load.of(candidate_id(record, rank)), overlap, rank)
