"""Whatever the history, growth is a factor, equal histories have equal growth, and memory ends."""

from __future__ import annotations

import math
import pickle

from hypothesis import given
from hypothesis import strategies as st

from commutator_slo.growth import Growth, GrowthConfig, GrowthState
from commutator_testing.profile import suite_settings

_settings = suite_settings(50)
_histories = st.lists(
    st.tuples(st.floats(0.1, 600), st.just(0.0) | st.floats(1e-6, 1e6)), max_size=40
)
FORECASTER = Growth(GrowthConfig())


def growth_after(history: list[tuple[float, float]], lead_s: float) -> float:
    state, time_s = GrowthState(), 0.0
    for gap_s, level in history:
        time_s += gap_s
        state = FORECASTER.update(state, time_s, level, lead_s)
    return FORECASTER.growth(state)


@_settings
@given(_histories, st.floats(1, 1000))
def test_growth_is_a_factor(history: list[tuple[float, float]], lead_s: float) -> None:
    growth = growth_after(history, lead_s)
    assert math.isfinite(growth)
    assert growth > 0


@_settings
@given(_histories, st.floats(1, 1000))
def test_equal_histories_give_equal_growth(
    history: list[tuple[float, float]], lead_s: float
) -> None:
    assert growth_after(history, lead_s) == growth_after(history, lead_s)


@_settings
@given(_histories)
def test_a_state_stays_as_it_was(history: list[tuple[float, float]]) -> None:
    state, time_s = GrowthState(), 0.0
    for gap_s, level in history:
        time_s += gap_s
        before, text = state, repr(state)
        state = FORECASTER.update(before, time_s, level, 60.0)
        assert repr(before) == text


def test_its_memory_has_a_bound() -> None:
    state, sizes = GrowthState(), []
    for tick in range(20_000):
        state = FORECASTER.update(state, tick * 5.0, 5 + 4 * math.sin(tick / 50), 120.0)
        if tick % 1000 == 0:
            sizes.append(len(pickle.dumps(state)))
    assert max(sizes[10:]) <= 1.5 * max(sizes[:10]) + 1024
