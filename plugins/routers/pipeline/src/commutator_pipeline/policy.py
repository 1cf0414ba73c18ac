"""Runs the stages in order and adds up the scores."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import Attribute, frozen

from commutator import (
    Candidate,
    Decision,
    Filter,
    Picker,
    RouterConfig,
    RouteRequest,
    RoutingPolicy,
    Scorer,
    setting,
)
from commutator_pipeline.stages import BestPicker

__all__ = ["Pipeline", "PipelineConfig"]

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

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        kept, notes = self._filter(request, candidates)
        scores: dict[str, dict[str, float]] = {c.worker_id: {} for c in kept}
        for term, scorer in zip(self._terms, self._config.scorers, strict=True):
            found = scorer.score(request, kept)
            for worker_id, terms in scores.items():
                terms[term] = scorer.weight * min(max(found[worker_id], 0.0), 1.0)
        totals = {worker_id: sum(terms.values()) for worker_id, terms in scores.items()}
        chosen = self._config.picker.choose(totals, rng)
        for worker_id, total in totals.items():
            scores[worker_id][_TOTAL] = total
        return Decision(
            worker_id=chosen,
            policy="pipeline",
            reason=f"total score {totals[chosen]:.2f} of {len(kept)} workers{notes}",
            scores=scores,
        )

    def _filter(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], str]:
        kept, notes = candidates, ""
        for stage in self._config.filters:
            left = stage.keep(request, kept)
            if not left:
                notes += f"; {stage.kind} would leave none and was skipped"
            elif len(left) < len(kept):
                notes += f"; {stage.kind} left {len(kept) - len(left)} out"
                kept = left
        return kept, notes


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
