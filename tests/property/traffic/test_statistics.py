"""Bets that gain nothing on average where versions are equal."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_traffic.statistics import Higher, MoreOften

times = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=60)
counts = st.integers(0, 40)


@given(of=st.integers(20, 200), more_of=st.integers(1, 60))
def test_a_hit_of_either_version_changes_the_stake_by_nothing_on_average(
    of: int, more_of: int
) -> None:
    """One hit among requests that all could have had it."""
    chance = more_of / (of + more_of)
    old, new = (math.exp(MoreOften().add(hit, of, 1 - hit, more_of).log_stake) for hit in (1, 0))
    assert (1 - chance) * old + chance * new == pytest.approx(1)
    assert new > 1 > old


@given(before=st.integers(20, 100), tolerance=st.sampled_from([0.0, 0.25, 1.0]))
def test_every_rank_alike_does_not_raise_the_stake(before: int, tolerance: float) -> None:
    old = [float(number) for number in range(1, before + 1)]
    stakes = [
        math.exp(Higher(tolerance).add(old, [(rank + 0.5) * (1 + tolerance)]).log_stake)
        for rank in range(before + 1)
    ]
    assert sum(stakes) / len(stakes) <= 1
    assert all(one < other for one, other in pairwise(stakes))


@given(parts=st.lists(st.tuples(times, times), max_size=8))
def test_few_values_wait_and_none_is_infinite(parts: list[tuple[list[float], list[float]]]) -> None:
    test = Higher(0.25)
    for before, after in parts:
        test = test.add(before, after)
        assert math.isfinite(test.log_stake)
    assert Higher().add([1.0] * 19, [99.0]).log_stake == 0
    assert Higher().add([1.0] * 19, [99.0]).add([1.0], []).log_stake > 0


@given(value=st.floats(0.001, 1e3), more=st.integers(1, 50))
def test_equal_values_are_no_evidence(value: float, more: int) -> None:
    assert Higher().add([value] * 30, [value] * more).log_stake <= 0


@given(rows=st.lists(st.tuples(counts, counts, counts, counts), max_size=12))
def test_no_failures_are_never_evidence(rows: list[tuple[int, int, int, int]]) -> None:
    quiet, some = MoreOften(), MoreOften()
    for hits, of, more_hits, more_of in rows:
        quiet = quiet.add(hits, of + hits, 0, more_of)
        some = some.add(hits, of + hits, more_hits, more_of + more_hits)
        assert math.isfinite(some.log_stake)
        assert quiet.log_stake <= 1e-9


def test_it_takes_three_failures_of_a_twentieth_and_none_of_the_others() -> None:
    test, stakes = MoreOften(), []
    for _ in range(3):
        test = test.add(0, 200, 1, 10)
        stakes.append(test.log_stake)
    assert stakes[1] < math.log(600) < stakes[2]
