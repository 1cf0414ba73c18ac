"""What each lane moves, and how many lanes there are."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from commutator_engine_kit.nixl.moves import lane_names, lanes_worth, shares

MIB = 1 << 20


@given(st.integers(0, 500), st.integers(1, 40))
def test_everything_has_its_share_once_and_in_order(count: int, parts: int) -> None:
    found = shares(count, parts)
    assert [item for part in found for item in part] == list(range(count))
    assert 1 <= len(found) <= parts
    assert len({len(part) for part in found[:-1]}) <= 1, "only the last is smaller"


@given(st.integers(0, 500), st.integers(0, 1 << 30), st.integers(1, 4))
def test_no_lane_has_nothing_to_do(count: int, size_bytes: int, most: int) -> None:
    lanes = lanes_worth(count, size_bytes, most)
    assert 1 <= lanes <= most
    assert lanes == 1 or lanes <= count


def test_a_little_is_moved_in_one_lane_and_much_in_all() -> None:
    assert lanes_worth(100, 2 * MIB, 2) == 1
    assert lanes_worth(100, 4 * MIB, 2) == 2
    assert lanes_worth(1, 64 * MIB, 2) == 1


def test_lanes_have_names_of_their_own_and_no_more_than_cpus() -> None:
    first, *others = lane_names("agent")
    assert first == "agent"
    assert len({first, *others}) == 1 + len(others) <= len(os.sched_getaffinity(0))
