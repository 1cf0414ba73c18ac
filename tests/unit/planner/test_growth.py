"""The forecaster `growth` counts how far demand grew within a lead time."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from commutator_slo.growth import Growth, GrowthConfig, GrowthState


def learned(levels: list[float], lead_s: float, **options: Any) -> float:
    config = GrowthConfig(kind="growth", **options)
    forecaster = Growth(config)
    state = GrowthState()
    for tick, level in enumerate(levels):
        state = forecaster.update(state, 5.0 * tick, level, lead_s)
    return forecaster.growth(state)


def test_before_anything_was_seen_the_prior_holds() -> None:
    assert learned([], 60) == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_the_forecast_is_the_quantile_of_the_largest_levels_seen(quantile: float) -> None:
    """Levels vary by chance only, so the last one tells nothing."""
    chance = random.Random(4)
    levels = [math.exp(chance.gauss(0, 0.2)) for _ in range(6000)]
    lead = 24
    largest = sorted(
        max(levels[start + 1 : start + lead + 1]) for start in range(len(levels) - lead)
    )
    expected = largest[int(quantile * len(largest))]
    found = learned(levels, 5.0 * lead, quantile=quantile, prior_samples=0, memory_s=1e9)
    assert found * levels[-1] == pytest.approx(expected, rel=0.05)


def test_where_demand_wanders_growth_counts_from_the_level() -> None:
    """The next level is the last one times something; what came before tells nothing."""
    chance, level, levels = random.Random(5), 10.0, []
    for _ in range(6000):
        level *= math.exp(chance.gauss(0, 0.05))
        levels.append(level)
    lead = 24
    seen = sorted(
        max(levels[start + 1 : start + lead + 1]) / levels[start]
        for start in range(len(levels) - lead)
    )
    found = learned(levels, 5.0 * lead, prior_samples=0, memory_s=1e9)
    assert found == pytest.approx(seen[int(0.9 * len(seen))], rel=0.1)


def test_demand_that_jumps_beyond_chance_is_believed() -> None:
    chance = random.Random(6)
    calm = [math.exp(chance.gauss(0, 0.05)) for _ in range(6000)]
    forecaster = Growth(GrowthConfig(kind="growth"))
    state = GrowthState()
    for tick, level in enumerate([*calm, 2.0, 2.0]):
        state = forecaster.update(state, 5.0 * tick, level, 60.0)
    assert forecaster.growth(state) >= 1.0, "of twice as much as before"
    assert forecaster.rests_on_s(state) < 600, "and rests on little"


def test_a_longer_lead_sees_more_growth() -> None:
    chance, level, levels = random.Random(7), 10.0, []
    for _ in range(2000):
        level *= math.exp(chance.gauss(0, 0.05))
        levels.append(level)
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
    assert learned(wild + calm, 60, memory_s=1e9, quantile=0.95) > 1.5


def test_a_pause_is_no_growth() -> None:
    assert learned([0.0] * 500 + [3.0] * 500, 60) == pytest.approx(1.0, abs=0.3)


def published(trace: str) -> list[float]:
    """Demand of one time after the other."""
    path = Path(__file__).parent / "demand" / f"{trace}.txt"
    lines = [one for one in path.read_text().splitlines() if not one.startswith("#")]
    return [float(one) for one in " ".join(lines).split()]


def growth_from_the_level(
    levels: list[float], every_s: float, lead_s: float, quantile: float
) -> float:
    """The quantile of all growths within the lead time, none of them forgotten or assumed."""
    config = GrowthConfig(kind="growth", quantile=quantile, prior_samples=0, memory_s=1e12)
    forecaster = Growth(config)
    state = GrowthState()
    for number, level in enumerate(levels):
        state = forecaster.update(state, every_s * number, level, lead_s)
    return forecaster.growth(evolve(state, ruling=0))


def as_written(value: float) -> Any:
    """To half a unit of its second decimal, and half a step of the forecaster, which are of 1 %."""
    return pytest.approx(value, abs=0.005 + 0.005 * value)


@pytest.mark.parametrize(
    ("lead_s", "quantile", "growth"),
    [
        *((30, 0.9, 1.25), (30, 0.95, 1.37)),
        *((120, 0.5, 1.09), (120, 0.9, 1.43), (120, 0.95, 1.54)),
        *((300, 0.5, 1.18), (300, 0.9, 1.64), (300, 0.95, 1.72)),
    ],
)
def test_growth_within_an_hour_of_conversations(
    lead_s: float, quantile: float, growth: float
) -> None:
    """Vector V11: windows of 60 s, of which the later ones begin within the lead time.

    They begin as this one ends, and then every 10 s, so the last one ends 50 s after the lead time.
    The vector's median at 30 s, 1.03, leaves windows out that overlap this one; the forecaster
    counts them.
    """
    sums = [0.0, *accumulate(published("azure_2023_conv"))]
    windows = [after - before for before, after in zip(sums, sums[6:], strict=False)]
    found = growth_from_the_level(windows, 10.0, lead_s + 50.0, quantile)
    assert found == as_written(growth)


@pytest.mark.parametrize(
    ("lead_s", "quantile", "growth"),
    [
        *((600, 0.5, 1.00), (600, 0.9, 1.19), (600, 0.95, 1.31), (600, 0.99, 1.58)),
        *((1800, 0.5, 1.06), (1800, 0.9, 1.38), (1800, 0.95, 1.55)),
        *((3600, 0.5, 1.11), (3600, 0.9, 1.54), (3600, 0.95, 1.73)),
    ],
)
def test_growth_within_two_weeks_of_a_service(
    lead_s: float, quantile: float, growth: float
) -> None:
    """Vector V11: windows of 600 s."""
    levels = published("servegen_m_large_14d")
    assert growth_from_the_level(levels, 600.0, lead_s, quantile) == as_written(growth)
