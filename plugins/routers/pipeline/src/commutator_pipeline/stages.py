"""The stages that come with the pipeline. A third party adds its own the same way."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated

from attrs import frozen

from commutator import (
    Bounds,
    Candidate,
    Filter,
    Fraction,
    Picker,
    PositiveInt,
    RouteRequest,
    Scorer,
    setting,
)

__all__ = [
    "BestPicker",
    "DrawPicker",
    "FewestPrefillTokens",
    "LoadScorer",
    "MaxRequests",
    "PrefixScorer",
]


@frozen(kw_only=True)
class MaxRequests(Filter):
    """Leaves out workers with too many requests in flight."""

    limit: PositiveInt = setting("A worker with this many requests in flight is left out.")

    def keep(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if c.load.active_requests < self.limit]


@frozen(kw_only=True)
class PrefixScorer(Scorer):
    """The part of the prompt that the worker's KV cache holds."""

    host: Fraction = setting("What a block in host memory counts, against one on the device.", 0.75)
    disk: Fraction = setting("The same for a block on disk.", 0.25)
    external: Fraction = setting("The same for a block in shared storage.", 0.5)

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        if not request.prompt_tokens:  # a prompt that only the engine can tokenize
            return {c.worker_id: 0.0 for c in candidates}
        return {c.worker_id: self._held(c) / request.prompt_blocks for c in candidates}

    def _held(self, candidate: Candidate) -> float:
        overlap = candidate.overlap
        lower = self.host * overlap.host + self.disk * overlap.disk
        return overlap.device + lower + self.external * overlap.external


@frozen(kw_only=True)
class LoadScorer(Scorer):
    """1 for the worker with the least work in KV blocks, 0 for the busiest."""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        work = {
            c.worker_id: c.load.active_decode_blocks
            + c.load.active_prefill_tokens / request.block_size
            for c in candidates
        }
        return less_is_better(work)


@frozen(kw_only=True)
class FewestPrefillTokens(Scorer):
    """1 for the worker with the fewest prompt tokens still to compute."""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        return less_is_better({c.worker_id: c.load.active_prefill_tokens for c in candidates})


@frozen(kw_only=True)
class BestPicker(Picker):
    """The highest total; ties are broken at random."""

    def choose(self, totals: Mapping[str, float], rng: random.Random) -> str:
        best = max(totals.values())
        return rng.choice([worker_id for worker_id, total in totals.items() if total == best])


@frozen(kw_only=True)
class DrawPicker(Picker):
    """A random draw, in which better totals are likelier."""

    temperature: Annotated[float, Bounds(above=0)] = setting(
        "Small: nearly always the best. Large: nearly even.", 0.2
    )

    def choose(self, totals: Mapping[str, float], rng: random.Random) -> str:
        best = max(totals.values())
        weights = [math.exp((total - best) / self.temperature) for total in totals.values()]
        return rng.choices(list(totals), weights)[0]


def less_is_better(amounts: Mapping[str, float]) -> dict[str, float]:
    """1 for the least amount, 0 for the most, the rest between in proportion."""
    least, most = min(amounts.values()), max(amounts.values())
    spread = (most - least) or 1.0
    return {name: 1 - (amount - least) / spread for name, amount in amounts.items()}
