"""What a routing policy is given, and what it must answer."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

from attrs import field, frozen

from commutator.routing.overlap import Overlap, WorkerRank
from commutator.types import WorkerRecord

__all__ = ["Candidate", "Decision", "Overlap", "RouteRequest", "RoutingPolicy", "WorkerLoad"]


@frozen
class RouteRequest:
    """One request as a policy sees it."""

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int = 0
    session_id: str | None = None
    priority: int = 0
    block_size: int = 16
    """Tokens in one KV block; overlaps and loads are counted in such blocks."""

    @property
    def prompt_blocks(self) -> float:
        """The prompt's length in blocks, not rounded."""
        return self.prompt_tokens / self.block_size


@frozen
class WorkerLoad:
    """What front doors have sent to a worker and not yet got back. Never a scraped gauge."""

    active_requests: int = 0
    active_prefill_tokens: int = 0
    """Prompt tokens dispatched whose first output token has not come yet."""
    active_decode_blocks: int = 0
    """KV blocks that the requests in flight hold, prompt and answer."""

    def __add__(self, other: WorkerLoad) -> WorkerLoad:
        return WorkerLoad(
            self.active_requests + other.active_requests,
            self.active_prefill_tokens + other.active_prefill_tokens,
            self.active_decode_blocks + other.active_decode_blocks,
        )


@frozen
class Candidate:
    """A live worker, or one data-parallel rank of it, that could serve the request."""

    worker: WorkerRecord
    load: WorkerLoad = WorkerLoad()
    overlap: Overlap = Overlap()
    """How much of the prompt its KV cache holds, in blocks by tier."""
    rank: int = 0

    @property
    def worker_id(self) -> str:
        """Names the candidate in decisions: the worker's id, with "@RANK" if it has several."""
        worker = self.worker
        several = worker.info.data_parallel_size > 1
        return f"{worker.worker_id}@{self.rank}" if several else worker.worker_id


def candidate_id(worker: WorkerRecord, rank: int) -> str:
    """The name of one rank of a worker, as ``Candidate.worker_id``."""
    return Candidate(worker, rank=rank).worker_id


@lru_cache(4096)
def ranks_of(worker_id: str, count: int) -> tuple[tuple[WorkerRank, str], ...]:
    """Each rank of a worker that has ``count`` of them, with its ``candidate_id``."""
    return tuple(
        (WorkerRank(worker_id, rank), f"{worker_id}@{rank}" if count > 1 else worker_id)
        for rank in range(count)
    )


@frozen
class Decision:
    """Who serves the request, and why."""

    worker_id: str
    policy: str
    reason: str
    """One sentence that a person understands."""
    scores: Mapping[str, Mapping[str, float]] = field(factory=dict)
    """Worker id to named terms, for every candidate that was compared."""


class RoutingPolicy(ABC):
    """Chooses a worker. A policy does no I/O and reads no clock; chance comes from ``rng``.

    One instance serves one model in one front-door process and is called from one thread, so it
    may keep state between calls. The same instance serves the live system, the simulator and the
    conformance suite.
    """

    uses_overlap: ClassVar[bool] = False
    """Whether ``pick`` looks at ``Candidate.overlap``; if not, prompts are not hashed for it."""

    @abstractmethod
    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        """The decision. ``candidates`` is never empty and is ordered by worker id."""

    def forget(self, worker_id: str) -> None:
        """The worker is gone; drop what was kept about it. Default: nothing was kept."""
