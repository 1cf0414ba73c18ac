"""Pieces that the `pipeline` policy is composed of, each a plugin: filters, scorers, a picker.

A stage is an attrs class whose fields are its options in the YAML file, beside `kind`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated

from attrs import frozen

from commutator.routing.contract import Candidate, RouteRequest
from commutator.schema import Bounds, setting

__all__ = ["Filter", "Picker", "RouteStage", "Scorer"]


@frozen(kw_only=True)
class RouteStage:
    """What every stage has. Stages are stateless, do no I/O and read no clock."""

    kind: str = setting("The stage plugin.")


@frozen(kw_only=True)
class Filter(RouteStage, ABC):
    """Leaves out candidates that must not get the request."""

    @abstractmethod
    def keep(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those that stay. A filter that would leave none is skipped for this request."""


@frozen(kw_only=True)
class Scorer(RouteStage, ABC):
    """Says how good each candidate is, from 0 to 1; higher is better."""

    weight: Annotated[float, Bounds(minimum=0)] = setting("Factor of this scorer.", 1.0)

    @abstractmethod
    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """A score for each worker id; values outside 0 to 1 are cut."""


@frozen(kw_only=True)
class Picker(RouteStage, ABC):
    """Chooses by the weighted sums."""

    @abstractmethod
    def choose(self, totals: Mapping[str, float], rng: random.Random) -> str:
        """The chosen worker id; ``totals`` is never empty."""
