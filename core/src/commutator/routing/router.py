"""Chooses a worker for each request of one model: candidates, policy and busy thresholds."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from attrs import asdict, frozen

from commutator.contract.request import GenerateRequest, RequestSummary
from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    Decision,
    Overlap,
    RouteRequest,
    RoutingPolicy,
    WorkerLoad,
    ranks_of,
)
from commutator.errors import RoutingError
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.workers import LiveWorker

__all__ = [
    "FALLBACK",
    "ModelRouter",
    "PolicyRunner",
    "Route",
    "describe_busy",
    "threshold_hit",
]

log = logging.getLogger(__name__)

FALLBACK = "fallback"
"""The policy's name in a decision made because the policy failed."""

_EXPLAINED = 100
_LOG_EVERY = 1000
_NOTHING = Overlap()
_MOST_GONE = 64


@frozen(eq=False)
class Route:
    """A routing decision and everything that it was based on."""

    decision: Decision
    candidate: Candidate
    worker: LiveWorker
    candidates: Sequence[Candidate]
    sequence_hashes: Sequence[int]
    block_size: int
    routing_s: float
    exact: Collection[str] | None = None
    """Ids of the workers whose overlap is known from KV events, not guessed. None: overlaps were
    not looked up, because the policy does not use them."""
    busy: Sequence[tuple[Candidate, str]] = ()
    """Busy candidates that were excluded, each with the threshold that it had reached."""
    waited_s: float = 0.0
    """Seconds that the request waited because every worker was busy."""

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that the chosen worker is expected to hold."""
        return self.candidate.overlap.blocks * self.block_size

    @property
    def best_overlap_blocks(self) -> int:
        """The longest cached prefix of any worker, busy ones included, in blocks."""
        everyone = chain(self.candidates, (candidate for candidate, _ in self.busy))
        return max(candidate.overlap.blocks for candidate in everyone)

    @property
    def given_up_blocks(self) -> int:
        """Blocks that the best worker holds beyond the chosen one: reuse given up for balance."""
        return self.best_overlap_blocks - self.candidate.overlap.blocks

    def explain(self) -> dict[str, Any]:
        """The candidates with their overlaps, loads and scores, and why one was chosen; for people.

        Overlaps that were not looked up are None. Of more than 100 candidates, the chosen one and
        the first others are shown, and ``left_out`` says how many are not.
        """
        unknown = self.exact is None
        chosen = self.decision.worker_id
        shown: list[tuple[Candidate, str | None]] = [(one, None) for one in self.candidates]
        shown += self.busy
        left_out = max(0, len(shown) - _EXPLAINED)
        if left_out:
            shown.sort(key=lambda pair: pair[0].worker_id != chosen)
            del shown[_EXPLAINED:]
        return {
            "worker_id": chosen,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "overlap_blocks": None if unknown else self.candidate.overlap.blocks,
            "best_overlap_blocks": None if unknown else self.best_overlap_blocks,
            "waited_s": round(self.waited_s, 6),
            "candidates": [self._explain(candidate, hit) for candidate, hit in shown],
            **({"left_out": left_out} if left_out else {}),
        }

    def _explain(self, candidate: Candidate, busy: str | None) -> dict[str, Any]:
        exact = self.exact
        return {
            "worker_id": candidate.worker_id,
            "overlap_blocks": None if exact is None else asdict(candidate.overlap),
            "guessed": None if exact is None else candidate.worker.worker_id not in exact,
            "load": asdict(candidate.load),
            "scores": dict(self.decision.scores.get(candidate.worker_id, {})),
            "busy": busy,
        }


class ModelRouter:
    """Asks one model's policy, with candidates made from workers, loads and overlaps."""

    def __init__(
        self,
        policy: RoutingPolicy,
        indexer: KvIndexer | None,
        load: InFlightLoad,
        rng: random.Random,
        block_size: int,
        *,
        strict: bool = False,
    ) -> None:
        """``indexer`` is None when the policy does not use overlaps.

        ``strict``: a policy's failure is a RoutingError; see ``PolicyRunner``.
        """
        self.policy = policy
        self.indexer = indexer
        self._load = load
        self._rng = rng
        self.block_size = block_size
        self._runner = PolicyRunner("routing policy", policy, strict=strict)
        self._known: dict[str, Candidate] = {}
        """The last candidate of each rank: most are the same for the next request."""

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        """The prompt's sequence hashes; empty when the policy does not use overlaps."""
        return self.indexer.hashes(request) if self.indexer is not None else ()

    def route(
        self, summary: RequestSummary, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> Route:
        """Ask the policy about ``workers``, at least one. Raises RoutingError if ``strict``."""
        started_s = time.perf_counter()
        return self._decide(summary, hashes, self._pairs(hashes, workers), (), started_s)

    def route_to_free(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        workers: Sequence[LiveWorker],
        busy: BusyConfig,
    ) -> Route | None:
        """``route`` among the ranks that are not busy; None if every rank is busy."""
        started_s = time.perf_counter()
        # Usually the first rank is free. When none is, the prompt need not be matched.
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
        """Every rank of the workers, with its load and its overlap with the prompt."""
        return [candidate for candidate, _ in self._pairs(hashes, workers)]

    def hits(self, workers: Sequence[LiveWorker], busy: BusyConfig) -> Iterator[str | None]:
        """The threshold that each rank of the workers has reached; None for a rank not busy."""
        for worker in workers:
            info = worker.record.info
            capacity = info.rank_capacity_blocks(self.block_size)
            for _, name in ranks_of(worker.record.worker_id, info.data_parallel_size):
                yield threshold_hit(busy, self._load.of(name), capacity)

    def _pairs(
        self, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> list[tuple[Candidate, LiveWorker]]:
        matches = self.indexer.match(hashes) if self.indexer is not None and hashes else {}
        known, pairs = self._known, []
        for worker in workers:
            record = worker.record
            for owner, name in ranks_of(record.worker_id, record.info.data_parallel_size):
                overlap, load = matches.get(owner, _NOTHING), self._load.of(name)
                candidate = known.get(name)
                if (
                    candidate is None
                    or candidate.load is not load
                    or candidate.overlap is not overlap
                    or candidate.worker is not record
                ):
                    candidate = known[name] = Candidate(
                        worker=record, load=load, overlap=overlap, rank=owner.rank
                    )
                pairs.append((candidate, worker))
        if len(known) > 2 * len(pairs) + _MOST_GONE:
            known.clear()  # most of them are of workers that are gone
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
            priority=summary.priority,
            user=summary.user,
            session_id=_conversation(summary),
            principal=summary.principal,
            headers=summary.headers,
            block_size=self.block_size,
        )
        candidates = [candidate for candidate, _ in pairs]
        decision, chosen = self._pick(request, candidates)
        candidate, worker = pairs[chosen]
        return Route(
            decision=decision,
            candidate=candidate,
            worker=worker,
            candidates=candidates,
            sequence_hashes=hashes,
            block_size=self.block_size,
            routing_s=time.perf_counter() - started_s,
            exact=None if self.indexer is None else self.indexer.exact,
            busy=left_out,
        )

    def _pick(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[Decision, int]:
        """The decision, and the index of the chosen candidate.

        When the policy fails, the candidate with the fewest requests in flight is chosen.
        """
        try:
            decision = self.policy.pick(request, candidates, self._rng)
            for number, candidate in enumerate(candidates):
                if candidate.worker_id == decision.worker_id:
                    return decision, number
            problem = f"chose {decision.worker_id!r}, which is not a candidate"
            cause = None
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            problem, cause = f"raised {type(error).__name__}: {error}", error
        problem = self._runner.failed(
            problem, cause, "the worker with the fewest requests is chosen"
        )
        return _fewest_requests(candidates, self._rng, problem)


class PolicyRunner:
    """Handles failures of a policy plugin, so that no request fails with it.

    A failure is an exception of the policy, or an answer that cannot be used. The first of every
    1,000 is logged. ``strict``: a failure raises RoutingError instead.
    """

    def __init__(self, what: str, policy: object, *, strict: bool = False) -> None:
        """``what`` names the kind of policy in messages, such as "routing policy"."""
        self._name = f"{what} {type(policy).__name__}"
        self._strict = strict
        self._failures = 0

    def failed(self, problem: str, cause: Exception | None, instead: str) -> str:
        """The problem, with the policy's name. ``instead``: what is done without its answer."""
        problem = f"{self._name} {problem}"
        if self._strict:
            raise RoutingError(problem) from cause
        if self._failures % _LOG_EVERY == 0:
            log.error("%s; %s (failure %d, one in %d is logged)",
                      problem, instead, self._failures + 1, _LOG_EVERY,
                      exc_info=cause)  # fmt: skip
        self._failures += 1
        return problem


def _fewest_requests(
    candidates: Sequence[Candidate], rng: random.Random, problem: str
) -> tuple[Decision, int]:
    fewest = min(candidate.load.active_requests for candidate in candidates)
    idlest = [i for i, one in enumerate(candidates) if one.load.active_requests == fewest]
    number = rng.choice(idlest)
    reason = f"fewest requests ({fewest}), because {problem}"
    return Decision(worker_id=candidates[number].worker_id, policy=FALLBACK, reason=reason), number


def threshold_hit(config: BusyConfig, load: WorkerLoad, kv_capacity_blocks: int) -> str | None:
    """The option whose threshold this load has reached; None if the worker is not busy.

    ``kv_capacity_blocks`` is the capacity of the worker, or of one data-parallel rank, in the
    blocks of ``load``; 0 if unknown. A worker with nothing in flight is never busy, so that every
    request is served eventually.
    """
    requests = config.max_active_requests
    if requests is not None and load.active_requests >= requests:
        return "max_active_requests"
    tokens = config.active_prefill_tokens_threshold
    if tokens is not None and load.active_prefill_tokens > tokens:
        return "active_prefill_tokens_threshold"
    part = config.active_decode_blocks_threshold
    if part is None or kv_capacity_blocks == 0:
        return None
    over = load.active_decode_blocks > part * kv_capacity_blocks
    return "active_decode_blocks_threshold" if over else None


def describe_busy(config: BusyConfig, hits: Sequence[str]) -> str:
    """A clause for error messages: how many workers are busy by which threshold; at least one."""
    parts = [
        f"{count} by {name}={getattr(config, name):g}" for name, count in Counter(hits).items()
    ]
    workers = "1 worker is" if len(hits) == 1 else f"{len(hits)} workers are"
    return f"{workers} busy ({', '.join(parts)})"


def _conversation(summary: RequestSummary) -> str | None:
    """The name of the conversation; two principals that choose the same name have two."""
    if summary.session_id is None or summary.principal is None:
        return summary.session_id
    return f"{summary.principal}/{summary.session_id}"
