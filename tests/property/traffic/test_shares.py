"""Shares of versions: in proportion to weights, sticky, and only what must move moves."""

from __future__ import annotations

from collections import Counter
from math import sqrt

from hypothesis import given, settings
from hypothesis import strategies as st

from commutator_traffic.shares import choose

KEYS = [f"session-{number}" for number in range(4000)]
NAMES = st.sampled_from(["v1", "v2", "v3", "llama-70b", "small", "ü"])
WEIGHTS = st.dictionaries(NAMES, st.floats(0.01, 100.0), min_size=1, max_size=5)


def shares(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight > 0}


@settings(deadline=None, max_examples=40)
@given(WEIGHTS)
def test_each_version_gets_its_share(weights: dict[str, float]) -> None:
    found = Counter(choose(weights, key) for key in KEYS)
    for name, share in shares(weights).items():
        off = abs(found[name] / len(KEYS) - share)
        assert off <= 5 * sqrt(share * (1 - share) / len(KEYS)) + 1 / len(KEYS)


@settings(deadline=None)
@given(WEIGHTS, st.text(max_size=40), st.floats(0.001, 1000.0), st.randoms())
def test_the_same_session_gets_the_same_version(
    weights: dict[str, float], key: str, scale: float, rng: object
) -> None:
    """In whatever order and unit weights are written, and whatever else has no weight."""
    chosen = choose(weights, key)
    assert chosen in weights
    turned = dict(reversed([(name, scale * one) for name, one in weights.items()]))
    assert choose({"unused": 0.0, **turned}, key) == chosen


@settings(deadline=None, max_examples=40)
@given(WEIGHTS, NAMES, st.floats(0.0, 100.0))
def test_when_one_weight_changes_only_its_share_moves(
    before: dict[str, float], name: str, weight: float
) -> None:
    after = {**before, name: weight}
    grows = weight > before.get(name, 0.0)
    for key in KEYS[:1000]:
        one, other = choose(before, key), choose(after, key)
        if one != other:
            assert (other if grows else one) == name


@settings(deadline=None, max_examples=40)
@given(WEIGHTS, WEIGHTS)
def test_nobody_moves_to_what_lost_weight(
    before: dict[str, float], after: dict[str, float]
) -> None:
    moved = 0
    for key in KEYS:
        one, other = choose(before, key), choose(after, key)
        if one != other:
            moved += 1
            assert one is not None
            assert other is not None
            # Of the two, the new one has grown beside the old one.
            assert after[other] * before[one] > before.get(other, 0.0) * after.get(one, 0.0)
    old, new = shares(before), shares(after)
    least = sum(max(0.0, old.get(name, 0.0) - new.get(name, 0.0)) for name in old)
    most = 2 * least / (1 + least)
    assert moved / len(KEYS) <= most + 5 * sqrt(0.25 / len(KEYS))


def test_nothing_has_weight() -> None:
    assert choose({}, "a") is None
    assert choose({"v1": 0.0}, "a") is None


def test_a_canary_that_grows_keeps_its_sessions() -> None:
    """From 5 % by way of 25 % to all: who has the new version never goes back."""
    reached: set[str] = set()
    for weight in (5, 25, 50, 95, 100):
        now = {key for key in KEYS if choose({"v1": 100 - weight, "v2": weight}, key) == "v2"}
        assert reached <= now
        reached = now
    assert len(reached) == len(KEYS)
