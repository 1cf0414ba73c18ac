"""Runs the stages in order and adds up the scores."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from attrs import Attribute, frozen

from commutator import (
    Candidate,
    Decision,
    Filter,
    Overlap,
    Picker,
    RouterConfig,
    RouteRequest,
    RoutingPolicy,
    Scorer,
    WorkerLoad,
    setting,
)
from commutator_pipeline.stages import BestPicker, Rating

_TOTAL = "total"
"""The weighted sum, among the terms that explain a decision."""


def _best() -> Picker:
    return BestPicker(kind="best")


def _at_least_one(
    config: PipelineConfig, field: Attribute[object], value: Sequence[Scorer]
) -> None:
    del config, field
    if not value:
        raise ValueError(
            "scorers: without any, workers are chosen at random; give at least one, such as "
            "{kind: load}"
        )


@frozen(kw_only=True)
class PipelineConfig(RouterConfig):
    """The stages, each with options of its own."""

    filters: tuple[Filter, ...] = setting("Leave candidates out, in this order.", ())
    scorers: tuple[Scorer, ...] = setting(
        "Say how good each candidate is; at least one.", validator=_at_least_one
    )
    picker: Picker = setting(
        "Chooses by the weighted sums; {kind: best} by default.", factory=_best
    )


class Pipeline(RoutingPolicy):
    """Filters, then the weighted sum of the scores, then the picker."""

    uses_overlap = True

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._terms = _term_names(config.scorers)
        self._searches = config.picker.takes_best and all(
            _agrees(scorer, "rating", "score") for scorer in config.scorers
        )

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        kept, notes = self._filter(request, candidates)
        if (ratings := self._ratings(request, kept)) is not None:
            return self._searched(kept, ratings, notes, rng)
        scores: dict[str, dict[str, float]] = {c.worker_id: {} for c in kept}
        for term, scorer in zip(self._terms, self._config.scorers, strict=True):
            found = scorer.score(request, kept)
            for worker_id, terms in scores.items():
                terms[term] = _weighted(scorer, found[worker_id])
        for terms in scores.values():
            terms[_TOTAL] = _total(terms.values())
        totals = {worker_id: terms[_TOTAL] for worker_id, terms in scores.items()}
        chosen = self._config.picker.choose(totals, rng)
        return Decision(
            worker_id=chosen,
            policy="pipeline",
            reason=f"total score {totals[chosen]:.2f} of {len(kept)} workers{notes}",
            scores=scores,
        )

    def _searched(
        self, kept: Sequence[Candidate], ratings: Sequence[Rating], notes: str, rng: random.Random
    ) -> Decision:
        """The same decision without a score for candidates that cannot be the best."""
        scorers = self._config.scorers

        def terms_of(load: WorkerLoad, overlap: Overlap) -> list[float]:
            return [_weighted(s, r(load, overlap)) for s, r in zip(scorers, ratings, strict=True)]

        found = self.pool(kept).least(lambda load, overlap: -_total(terms_of(load, overlap)))
        chosen = rng.choice(found.candidates)
        scores: dict[str, dict[str, float]] = {}
        for one in (*found.compared, chosen):
            terms = scores[one.worker_id] = dict(
                zip(self._terms, terms_of(one.load, one.overlap), strict=True)
            )
            terms[_TOTAL] = _total(terms.values())
        if not_scored := len(kept) - len(scores):
            notes += f"; {not_scored} others have at most {-found.others_cost:.2f}"
        return Decision(
            worker_id=chosen.worker_id,
            policy="pipeline",
            reason=f"total score {-found.cost:.2f} of {len(kept)} workers{notes}",
            scores=scores,
            not_scored=not_scored,
        )

    def _ratings(self, request: RouteRequest, kept: Sequence[Candidate]) -> list[Rating] | None:
        """What each scorer rates by; None if one does not say, or the picker wants all totals."""
        ratings: list[Rating] = []
        for scorer in self._config.scorers if self._searches else ():
            if (rating := scorer.rating(request, kept)) is None:
                return None
            ratings.append(rating)
        return ratings or None

    def _filter(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], str]:
        kept, notes = candidates, ""
        for stage in self._config.filters:
            left = self._left(stage, request, kept)
            if not left:
                notes += f"; {stage.kind} would leave none and was skipped"
            elif len(left) < len(kept):
                notes += f"; {stage.kind} left {len(kept) - len(left)} out"
                kept = left
        return kept, notes

    def _left(
        self, stage: Filter, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        most = stage.most_requests(request) if _agrees(stage, "most_requests", "keep") else None
        if most is None:
            return stage.keep(request, candidates)
        return self.pool(candidates).at_most_requests(most)


def _weighted(scorer: Scorer, score: float) -> float:
    return scorer.weight * min(max(score, 0.0), 1.0)


def _total(terms: Iterable[float]) -> float:
    total = 0.0
    for term in terms:  # in order, unlike sum, so that a smaller term never makes a larger total
        total += term
    return total


def _agrees(stage: Filter | Scorer, short: str, long: str) -> bool:
    """Whether the method ``short`` is at least as new as ``long``, which a subclass may replace."""
    for kind in type(stage).__mro__:
        if short in vars(kind):
            return True
        if long in vars(kind):
            return False
    return False


def _term_names(scorers: Sequence[Scorer]) -> list[str]:
    """A name for each scorer's part of the sum: its kind, and KIND#2 where that is taken."""
    names: list[str] = []
    for scorer in scorers:
        name, number = scorer.kind, 1
        while name == _TOTAL or name in names:
            number += 1
            name = f"{scorer.kind}#{number}"
        names.append(name)
    return names
