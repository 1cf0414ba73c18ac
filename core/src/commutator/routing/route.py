"""What came of routing one request: the worker, and everything the decision was based on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from attrs import asdict, frozen

from commutator.routing.contract import Candidate, Decision
from commutator.routing.fallback import FALLBACK
from commutator.routing.view import LiveWorker

__all__ = ["Route", "RouteFacts"]


@frozen
class RouteFacts:
    """One decision in numbers, for metrics."""

    routing_s: float
    overlap_blocks: int
    """Of the prompt's blocks, those that the chosen worker is thought to hold."""
    best_overlap_blocks: int
    """The same of the worker that holds most."""
    waited_s: float = 0.0
    """How long the request was held back because every worker was busy."""
    prompt_blocks: int = 0
    """The prompt's full blocks; 0 when the policy does not look at overlaps."""
    fallback: bool = False
    """The policy failed, and the worker was chosen without it."""

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompt's blocks that the chosen worker is thought to hold, if known."""
        return self.overlap_blocks / self.prompt_blocks if self.prompt_blocks else None

    @property
    def given_up_blocks(self) -> int:
        """What the best worker holds beyond the chosen one: reuse given up for balance."""
        return self.best_overlap_blocks - self.overlap_blocks


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
    exact: Collection[str] | None = None
    """The workers whose overlaps are no guesses; None: the policy does not look at overlaps, so
    what the workers hold is not known."""
    busy: Sequence[tuple[Candidate, str]] = ()
    """Who was left out, each with the threshold that it had hit."""
    waited_s: float = 0.0

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that the chosen worker is thought to hold."""
        return self.candidate.overlap.blocks * self.block_size

    @property
    def best_overlap_blocks(self) -> int:
        """The longest cached prefix that any worker had, also a busy one."""
        everybody = chain(self.candidates, (candidate for candidate, _ in self.busy))
        return max(candidate.overlap.blocks for candidate in everybody)

    @property
    def facts(self) -> RouteFacts:
        return RouteFacts(
            routing_s=self.routing_s,
            overlap_blocks=self.candidate.overlap.blocks,
            best_overlap_blocks=self.best_overlap_blocks,
            waited_s=self.waited_s,
            prompt_blocks=len(self.sequence_hashes),
            fallback=self.decision.policy == FALLBACK,
        )

    def explain(self) -> dict[str, Any]:
        """For people: every candidate with its overlap, load and scores, and why one won.

        Overlaps that nobody looked up are None.
        """
        unknown = self.exact is None
        return {
            "worker_id": self.decision.worker_id,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "overlap_blocks": None if unknown else self.candidate.overlap.blocks,
            "best_overlap_blocks": None if unknown else self.best_overlap_blocks,
            "waited_s": round(self.waited_s, 6),
            "candidates": [
                *(self._explain(candidate, None) for candidate in self.candidates),
                *(self._explain(candidate, hit) for candidate, hit in self.busy),
            ],
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
