"""The measured cost of loads, and how much of a prompt is worth loading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_engine_kit.kv.block_manager.block_pool import LoadCost, LoadSpeed
from commutator_engine_kit.kv.block_manager.onboard import best_prefix

SECONDS = st.floats(0, 10)
COSTS = st.builds(LoadCost, latency_s=SECONDS, block_s=SECONDS)


@given(
    COSTS,
    st.lists(st.integers(1, 500), min_size=30, max_size=60).filter(lambda n: len(set(n)) > 9),
)
def test_latency_and_bandwidth_are_distinguished(cost: LoadCost, batches: list[int]) -> None:
    measured = LoadSpeed()
    for blocks in batches * 8:
        measured.measured(blocks, cost.of(blocks), 0.0)
    assert measured.cost is not None
    for blocks in set(batches):
        assert measured.cost.of(blocks) == pytest.approx(cost.of(blocks), rel=0.05, abs=0.01)


@given(st.lists(st.tuples(st.integers(1, 500), SECONDS), min_size=1))
def test_no_part_of_a_cost_is_negative(loads: list[tuple[int, float]]) -> None:
    measured = LoadSpeed()
    for blocks, seconds in loads:
        measured.measured(blocks, seconds, 0.0)
    assert measured.cost is not None
    assert measured.cost.latency_s >= 0
    assert measured.cost.block_s >= 0


def test_a_tier_that_changes_is_measured_anew() -> None:
    measured = LoadSpeed()
    for _ in range(50):
        measured.measured(8, 8.0, 0.0)
    for _ in range(50):
        measured.measured(8, 0.08, 1.0)
    assert measured.cost is not None
    assert measured.cost.of(8) == pytest.approx(0.08, rel=0.6)
    assert measured.measured_s == 1.0


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(COSTS, min_size=3, max_size=3),
    st.floats(0.001, 10),
)
def test_no_other_prefix_takes_less_time(
    tiers: list[int], costs: list[LoadCost], block_s: float
) -> None:
    chosen = best_prefix(tiers, dict(enumerate(costs)), block_s).blocks

    def total(blocks: int) -> float:
        loads = [costs[tier].of(tiers[:blocks].count(tier)) for tier in range(3)]
        return max(loads) + (len(tiers) - blocks) * block_s

    assert total(chosen) == pytest.approx(min(total(n) for n in range(len(tiers) + 1)))


def test_mixed_tiers() -> None:
    costs = {0: LoadCost(latency_s=0.001, block_s=0.001), 1: LoadCost(latency_s=0.5, block_s=0.1)}
    fast_only = best_prefix([0, 0, 1, 1], costs, 0.05)
    assert fast_only.blocks == 2, "the slow tier's blocks are computed"
    assert best_prefix([0, 0, 1, 1], costs, 1.0).blocks == 4
    assert best_prefix([1, 1], costs, 0.05).blocks == 0


def test_what_is_not_known_is_loaded() -> None:
    assert best_prefix([0, 0], {0: LoadCost(latency_s=9.0, block_s=9.0)}, None).blocks == 2
    assert best_prefix([0, 0], {0: None}, 0.001).blocks == 2
