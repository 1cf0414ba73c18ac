"""The forecaster `growth`: how much demand grew, of late, while a worker would have started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from attrs import evolve, field, frozen

from commutator import Bounds, NonNegativeInt, PositiveSeconds, setting

_RESOLUTION = math.log(1.01)
_FORGOTTEN = 1e-6
_LEAST, _MOST = math.log(0.1), math.log(10.0)
_MOST_PRIOR = 10.0
_SMALLEST = 1e-9
"""Levels below it are taken for it."""
_LEVEL_S = 60.0
"""A level is the demand of this time."""
_SPANS_S = (0.0, 300.0, 1500.0, 7500.0)
"""Of the bases."""
_SCORED_S = 7200.0
"""Losses and deviations count by this exponential time constant."""
_BETTER = 0.9
"""Another base rules once its loss is below this part of that of the ruling one."""
_SURPRISE = 5.0
"""Standard deviations that chance does not explain."""
_FEWEST_DEVIATIONS = 60


@frozen(kw_only=True)
class GrowthConfig:
    """Options of the forecaster `growth`."""

    kind: Literal["growth"] = setting("The forecaster.", "growth")
    quantile: Annotated[float, Bounds(above=0, maximum=0.999)] = setting(
        "The fleet is sized for this quantile of the growth.", 0.9
    )
    prior: Annotated[float, Bounds(minimum=1, maximum=_MOST_PRIOR)] = setting(
        "The growth that is assumed before any was seen.", 1.25
    )
    prior_samples: NonNegativeInt = setting(
        "The number of plans after which what was seen counts as much as `prior`.", 60
    )
    memory_s: PositiveSeconds = setting(
        "Seconds after which a growth counts a third (1/e) of a new one.", 86_400.0
    )


@frozen(kw_only=True)
class Base:
    """What growth is counted from: the level, or a mean of levels; and the growths seen from it."""

    span_s: float
    """Time constant of the mean; 0: the level itself."""
    value: float = 0.0
    weight_s: float = 0.0
    """Seconds of levels that the mean rests on."""
    deviation: float = 0.0
    """Mean square of the logarithm of this mean over the next longer one."""
    deviations: float = 0.0
    """Number of them, decayed."""
    seen: Mapping[int, float] = field(factory=dict)
    """Weight by growth, in steps of its logarithm."""
    loss: float = 0.0
    """Of its forecasts, decayed."""


@frozen
class _Told:
    """A level whose growth is not known yet."""

    time_s: float
    level: float
    bases: tuple[float, ...]
    forecasts: tuple[float, ...]
    """Logarithms of the quantile of the largest level within the lead time, from each base."""


@frozen(kw_only=True)
class GrowthState:
    """The levels whose growth is not known yet, and the bases."""

    time_s: float | None = None
    level: float = 0.0
    recent: tuple[_Told, ...] = ()
    bases: tuple[Base, ...] = tuple(Base(span_s=span_s) for span_s in _SPANS_S)
    ruling: int = 0
    """The base whose forecasts are the best of late."""


class Growth:
    """Forecasts how far the largest level within the lead time is above a base at its beginning.

    A level is the demand of one role over the last minute in seconds of work per second: the number
    of workers that it would keep busy. States are never changed in place.

    Bases are the level and means of it over longer times. Constant demand is best told from a long
    mean, which does not follow chance, and demand that moves from the level. The base rules whose
    forecasts have had the least pinball loss. When a short mean leaves a longer one by more than
    chance explains, the longer one begins anew from it.
    """

    def __init__(self, config: GrowthConfig) -> None:
        self._config = config

    def update(self, state: GrowthState, time_s: float, level: float, lead_s: float) -> GrowthState:
        """The state after the level at ``time_s``, which is later than that of the call before.

        ``lead_s``: seconds until a worker started now is ready.
        """
        passed_s = _LEVEL_S if state.time_s is None else time_s - state.time_s
        bases = self._scored(state, time_s, level, lead_s, passed_s)
        recent = tuple(one for one in state.recent if one.time_s > time_s - lead_s)
        bases = _restarted([_moved(base, level, passed_s) for base in bases], passed_s)
        ruling = state.ruling
        best = min(range(len(bases)), key=lambda one: bases[one].loss)
        if bases[best].loss < _BETTER * bases[ruling].loss:
            ruling = best
        told = _Told(
            time_s,
            level,
            tuple(base.value for base in bases),
            tuple(_log(base.value) + self._quantile(base) for base in bases),
        )
        return GrowthState(
            time_s=time_s, level=level, recent=(*recent, told), bases=bases, ruling=ruling
        )

    def growth(self, state: GrowthState) -> float:
        """The factor by which the level may grow within the lead time; above 0.

        Below 1 where the level is above what it usually is only by chance.
        """
        base = state.bases[state.ruling]
        growth = math.exp(self._quantile(base))
        if base.value <= 0 or state.level <= 0:
            return max(1.0, growth)
        return max(growth, 1.0) * base.value / state.level

    def rests_on_s(self, state: GrowthState) -> float:
        """Seconds of demand that the growth times the level rests on; at least a minute.

        The fewer requests arrive in that time, the more cautiously a fleet shrinks.
        """
        return max(_LEVEL_S, state.bases[state.ruling].weight_s)

    def _scored(
        self, state: GrowthState, time_s: float, level: float, lead_s: float, passed_s: float
    ) -> tuple[Base, ...]:
        """The bases with the growths that are known by now."""
        kept = math.exp(-passed_s / self._config.memory_s)
        kept_loss = math.exp(-passed_s / _SCORED_S)
        bases = [
            evolve(
                base,
                seen={step: w * kept for step, w in base.seen.items() if w > _FORGOTTEN},
                loss=base.loss * kept_loss,
            )
            for base in state.bases
        ]
        over = [one for one in state.recent if one.time_s <= time_s - lead_s]
        for number, one in enumerate(over):
            later = [told.level for told in state.recent[number + 1 :]]
            most = _log(max([*later, level]))
            for index, base in enumerate(bases):
                if one.bases[index] <= 0 or one.level <= 0:
                    continue
                growth = most - _log(one.bases[index])
                step = round(min(max(growth, _LEAST), _MOST) / _RESOLUTION)
                error = most - one.forecasts[index]
                quantile = self._config.quantile
                loss = max(quantile * error, (quantile - 1) * error)
                bases[index] = evolve(
                    base,
                    seen={**base.seen, step: base.seen.get(step, 0.0) + 1.0},
                    loss=base.loss + loss,
                )
        return tuple(bases)

    def _quantile(self, base: Base) -> float:
        """The logarithm of the quantile of the growths from this base, and of the prior."""
        config = self._config
        weights = dict(base.seen)
        assumed = round(math.log(config.prior) / _RESOLUTION)
        weights[assumed] = weights.get(assumed, 0.0) + config.prior_samples
        left = config.quantile * sum(weights.values())
        for step, weight in sorted(weights.items()):
            left -= weight
            if left <= 0:
                return step * _RESOLUTION
        return 0.0  # nothing was seen, and the prior has no weight


def _log(level: float) -> float:
    return math.log(max(level, _SMALLEST))


def _moved(base: Base, level: float, passed_s: float) -> Base:
    """The mean with one more level, which has lasted for ``passed_s``."""
    kept = math.exp(-passed_s / base.span_s) if base.span_s else 0.0
    weight_s = base.weight_s * kept + passed_s
    value = base.value + (level - base.value) * passed_s / weight_s
    return evolve(base, value=value, weight_s=weight_s)


def _restarted(bases: Sequence[Base], passed_s: float) -> tuple[Base, ...]:
    """Each mean that the next shorter one has left by more than chance begins anew from it."""
    made = [bases[0]]
    for longer in bases[1:]:
        base, shorter = longer, made[-1]
        if longer.value > 0 and shorter.value > 0:
            moved = (_log(shorter.value) - _log(longer.value)) ** 2
            known = shorter.deviations > _FEWEST_DEVIATIONS
            if known and moved > _SURPRISE**2 * shorter.deviation:
                base = evolve(longer, value=shorter.value, weight_s=max(shorter.weight_s, passed_s))
            else:
                deviations = shorter.deviations * math.exp(-passed_s / _SCORED_S) + 1.0
                deviation = shorter.deviation + (moved - shorter.deviation) / deviations
                made[-1] = evolve(shorter, deviation=deviation, deviations=deviations)
        made.append(base)
    return tuple(made)
