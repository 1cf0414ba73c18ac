"""The forecaster `growth` counts how far demand grew within a lead time."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from commutator_slo.growth import Growth, GrowthConfig


def learned(levels: list[float], lead_s: float, **options: Any) -> float:
    config = GrowthConfig(kind="growth", **options)
    forecaster = Growth(config)
    state = forecaster.begin()
    for tick, level in enumerate(levels):
        state = forecaster.update(state, 5.0 * tick, level, lead_s)
    return forecaster.growth(state, lead_s)


def test_before_anything_was_seen_the_prior_holds() -> None:
    assert learned([], 60) == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_growth_is_the_quantile_of_what_was_seen(quantile: float) -> None:
    chance = random.Random(4)
    levels = [math.exp(chance.gauss(0, 0.2)) for _ in range(3000)]
    lead = 24
    seen = sorted(
        max(levels[start + 1 : start + lead + 1]) / levels[start]
        for start in range(len(levels) - lead)
    )
    expected = max(1.0, seen[int(quantile * len(seen))])
    found = learned(levels, 5.0 * lead, quantile=quantile, prior_samples=0, memory_s=1e9)
    assert found == pytest.approx(expected, rel=0.02)


def test_a_longer_lead_sees_more_growth() -> None:
    levels = [10 + 8 * math.sin(tick / 60) for tick in range(2000)]
    short, long = learned(levels, 30), learned(levels, 300)
    assert 1 < short < long


def test_constant_demand_does_not_grow() -> None:
    assert learned([7.0] * 2000, 120) == pytest.approx(1.0, abs=0.01)


def test_what_was_seen_long_ago_counts_little() -> None:
    wild = [1.0, 5.0] * 500
    calm = [5.0] * 4000
    assert learned(wild + calm, 60, memory_s=1000.0, prior_samples=0) == pytest.approx(
        1.0, abs=0.01
    )
    assert learned(wild + calm, 60, memory_s=1e9, quantile=0.95) > 4


def test_a_pause_is_no_growth() -> None:
    assert learned([0.0] * 500 + [3.0] * 500, 60) == pytest.approx(1.0, abs=0.3)
