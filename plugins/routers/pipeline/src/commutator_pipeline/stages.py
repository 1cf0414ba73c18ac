"""The stages that come with the pipeline. A third party adds its own the same way."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from attrs import frozen

from commutator import (
    Bounds,
    Candidate,
    Filter,
    Fraction,
    Overlap,
    Picker,
    PositiveInt,
    RouteRequest,
    RoutingPolicy,
    Scorer,
    WorkerLoad,
    setting,
)

Rating = Callable[[WorkerLoad, Overlap], float]
"""A score from a candidate's load and overlap."""


@frozen(kw_only=True)
class MaxRequests(Filter):
    """Leaves out workers with too many requests in flight."""

    limit: PositiveInt = setting("A worker with this many requests in flight is left out.")

    def keep(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if c.load.active_requests < self.limit]

    def most_requests(self, request: RouteRequest) -> float:
        return self.limit - 1


@frozen(kw_only=True)
class _Rated(Scorer):
    """A scorer that depends on nothing but a candidate's load and overlap."""

    @abstractmethod
    def rating(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Rating: ...

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        rating = self.rating(request, candidates)
        return {c.worker_id: rating(c.load, c.overlap) for c in candidates}


@frozen(kw_only=True)
class PrefixScorer(_Rated):
    """The part of the prompt that the worker's KV cache holds."""

    host: Fraction = setting("What a block in host memory counts, against one on the device.", 0.75)
    disk: Fraction = setting("The same for a block on disk.", 0.25)
    external: Fraction = setting("The same for a block in shared storage.", 0.5)

    def rating(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Rating:
        blocks = request.prompt_blocks
        if not blocks:  # a prompt that only the engine can tokenize
            return lambda *_: 0.0
        return lambda _, overlap: self._held(overlap) / blocks

    def _held(self, overlap: Overlap) -> float:
        lower = self.host * overlap.host + self.disk * overlap.disk
        return overlap.device + lower + self.external * overlap.external


@frozen(kw_only=True)
class LoadScorer(_Rated):
    """1 for the worker with the least work in KV blocks, 0 for the busiest."""

    def rating(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Rating:
        return less_is_better(
            candidates,
            lambda load: (
                load.active_decode_blocks + load.active_prefill_tokens / request.block_size
            ),
        )


@frozen(kw_only=True)
class FewestPrefillTokens(_Rated):
    """1 for the worker with the fewest prompt tokens still to compute."""

    def rating(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Rating:
        return less_is_better(candidates, lambda load: load.active_prefill_tokens)


@frozen(kw_only=True)
class BestPicker(Picker):
    """The highest total; ties are broken at random."""

    takes_best = True

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


def less_is_better(
    candidates: Sequence[Candidate], amount: Callable[[WorkerLoad], float]
) -> Rating:
    """1 for the least amount of any candidate, 0 for the most, the rest between in proportion."""
    pool = RoutingPolicy.pool(candidates)
    least, most = pool.least(lambda load, _: amount(load)).cost, pool.most(amount)
    spread = (most - least) or 1.0
    return lambda load, _: 1 - (amount(load) - least) / spread
