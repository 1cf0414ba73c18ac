"""The forecaster `growth`: how much demand grew, of late, while a worker would have started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from commutator import Bounds, NonNegativeInt, PositiveSeconds, setting
from commutator.planner import Forecaster, ForecasterConfig

__all__ = ["Growth", "GrowthConfig", "GrowthState"]

_RESOLUTION = math.log(1.01)
_FORGOTTEN = 1e-6
_LEAST, _MOST = 0.5, 10.0


@frozen(kw_only=True)
class GrowthConfig(ForecasterConfig):
    """Options of the forecaster `growth`."""

    quantile: Annotated[float, Bounds(above=0, maximum=0.999)] = setting(
        "The fleet is sized for this quantile of the growth.", 0.9
    )
    prior: Annotated[float, Bounds(minimum=1, maximum=_MOST)] = setting(
        "The growth that is assumed before any was seen.", 1.25
    )
    prior_samples: NonNegativeInt = setting(
        "The number of plans after which what was seen counts as much as `prior`.", 60
    )
    memory_s: PositiveSeconds = setting(
        "Seconds after which a growth counts a third (1/e) of a new one.", 86_400.0
    )


@frozen(kw_only=True)
class GrowthState:
    """The levels whose growth is not known yet, and the growths seen."""

    time_s: float | None = None
    recent: tuple[tuple[float, float], ...] = ()
    """Times and levels."""
    seen: Mapping[int, float] = field(factory=dict)
    """Weight by growth, in steps of its logarithm."""


class Growth(Forecaster[GrowthState]):
    """Counts how far the largest level within the lead time was above the one at its beginning."""

    def __init__(self, config: GrowthConfig) -> None:
        self._config = config

    def begin(self) -> GrowthState:
        return GrowthState()

    def update(self, state: GrowthState, time_s: float, level: float, lead_s: float) -> GrowthState:
        recent = (*state.recent, (time_s, level))
        seen = state.seen
        if state.time_s is not None:
            kept = math.exp(-(time_s - state.time_s) / self._config.memory_s)
            seen = {step: weight * kept for step, weight in seen.items() if weight > _FORGOTTEN}
        while len(recent) > 1 and recent[0][0] <= time_s - lead_s:
            (_, before), *later = recent
            recent = tuple(later)
            if before > 0:
                growth = max(level for _, level in later) / before
                step = round(math.log(min(max(growth, _LEAST), _MOST)) / _RESOLUTION)
                seen = {**seen, step: seen.get(step, 0.0) + 1.0}
        return GrowthState(time_s=time_s, recent=recent, seen=seen)

    def growth(self, state: GrowthState, lead_s: float) -> float:
        config = self._config
        weights = dict(state.seen)
        assumed = round(math.log(config.prior) / _RESOLUTION)
        weights[assumed] = weights.get(assumed, 0.0) + config.prior_samples
        left = config.quantile * sum(weights.values())
        for step, weight in sorted(weights.items()):
            left -= weight
            if left <= 0:
                return max(1.0, math.exp(step * _RESOLUTION))
        return 1.0  # nothing was seen, and the prior has no weight
