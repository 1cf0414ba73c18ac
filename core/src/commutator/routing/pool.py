"""The workers of one model: who could serve a request, and whom the policy picks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from commutator.config.model import BusyConfig
from commutator.routing.busy import threshold_hit
from commutator.routing.contract import (
    Candidate,
    RouteRequest,
    RoutingPolicy,
    ranks_of,
)
from commutator.routing.fallback import Asker
from commutator.routing.load import InFlightLoad
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.route import Route
from commutator.routing.view import LiveWorker
from commutator.types import GenerateRequest, RequestSummary

__all__ = ["KnownBlocks", "ModelPool"]

_NOTHING = Overlap()


class KnownBlocks(Protocol):
    """What is known of the workers' caches; see ``commutator.routing.cache_view.CacheView``."""

    def hashes(self, request: GenerateRequest) -> Sequence[int]: ...

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]: ...

    @property
    def exact(self) -> frozenset[str]:
        """The workers that tell what they hold; what others hold is guessed."""
        ...


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
        *,
        strict: bool = False,
    ) -> None:
        """``cache`` is None when the policy does not look at overlaps.

        ``strict``: a policy's failure is a RoutingError; see ``Asker``.
        """
        self.policy = policy
        self.cache = cache
        self._load = load
        self._rng = rng
        self.block_size = block_size
        self._asker = Asker(policy, strict=strict)

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        """The prompt's sequence hashes, or none when nobody needs them."""
        return self.cache.hashes(request) if self.cache is not None else ()

    def route(
        self, summary: RequestSummary, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> Route:
        """Ask the policy about ``workers``, of which there is at least one."""
        started_s = time.perf_counter()
        return self._decide(summary, hashes, self._pairs(hashes, workers), (), started_s)

    def route_to_free(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        workers: Sequence[LiveWorker],
        busy: BusyConfig,
    ) -> Route | None:
        """The same among the ranks of workers that are not busy; None if there is none."""
        started_s = time.perf_counter()
        # Mostly the first is free; when none is, the prompt need not be matched.
        if all(self.hits(workers, busy)):
            return None
        free: list[tuple[Candidate, LiveWorker]] = []
        left_out: list[tuple[Candidate, str]] = []
        for pair in self._pairs(hashes, workers):
            candidate = pair[0]
            capacity = candidate.worker.info.rank_capacity_blocks(self.block_size)
            hit = threshold_hit(busy, candidate.load, capacity)
            if hit is None:
                free.append(pair)
            else:
                left_out.append((candidate, hit))
        return self._decide(summary, hashes, free, left_out, started_s)

    def candidates(self, hashes: Sequence[int], workers: Sequence[LiveWorker]) -> list[Candidate]:
        """Every rank of the workers, with its load and what it holds of the prompt."""
        return [candidate for candidate, _ in self._pairs(hashes, workers)]

    def hits(self, workers: Sequence[LiveWorker], busy: BusyConfig) -> Iterator[str | None]:
        """For each rank of the workers the threshold that it has hit; None if it is not busy."""
        for worker in workers:
            info = worker.record.info
            capacity = info.rank_capacity_blocks(self.block_size)
            for _, name in ranks_of(worker.record.worker_id, info.data_parallel_size):
                yield threshold_hit(busy, self._load.of(name), capacity)

    def _pairs(
        self, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> list[tuple[Candidate, LiveWorker]]:
        matches = self.cache.match(hashes) if self.cache is not None and hashes else {}
        pairs = []
        for worker in workers:
            record = worker.record
            for owner, name in ranks_of(record.worker_id, record.info.data_parallel_size):
                overlap = matches.get(owner, _NOTHING)
                candidate = Candidate(record, self._load.of(name), overlap, owner.rank)
                pairs.append((candidate, worker))
        return pairs

    def _decide(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        pairs: Sequence[tuple[Candidate, LiveWorker]],
        left_out: Sequence[tuple[Candidate, str]],
        started_s: float,
    ) -> Route:
        request = RouteRequest(
            request_id=summary.request_id,
            model=summary.model,
            prompt_tokens=summary.prompt_tokens,
            max_tokens=summary.max_tokens,
            session_id=summary.session_id,
            priority=summary.priority,
            block_size=self.block_size,
        )
        candidates = [candidate for candidate, _ in pairs]
        decision, chosen = self._asker.ask(request, candidates, self._rng)
        candidate, worker = pairs[chosen]
        return Route(
            decision=decision,
            candidate=candidate,
            worker=worker,
            candidates=candidates,
            sequence_hashes=hashes,
            block_size=self.block_size,
            routing_s=time.perf_counter() - started_s,
            exact=None if self.cache is None else self.cache.exact,
            busy=left_out,
        )
