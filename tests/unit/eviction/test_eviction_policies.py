"""What each eviction policy is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commutator.contract.block import BlockKey, RetentionHints
from commutator.contract.eviction import EvictionPolicy
from commutator.plugins import load_plugins
from commutator_eviction import S3FifoConfig
from commutator_eviction.arc import Arc
from commutator_eviction.leaf_first import LeafFirst
from commutator_eviction.lru import Lru
from commutator_eviction.s3fifo import S3Fifo
from commutator_eviction.tinylfu import FrequencySketch, TinyLfu

CAPACITY = 200


def key(number: int) -> BlockKey:
    return number.to_bytes(32, "little")


def add(policy: EvictionPolicy, number: int, parent: int | None = None) -> None:
    above = key(parent) if parent is not None else None
    policy.added(key(number), above, RetentionHints(), 0.0)


def evict(policy: EvictionPolicy, count: int = 1) -> list[int]:
    victims = policy.victims(count, lambda _: True, 0.0)
    for victim in victims:
        policy.removed(victim, evicted=True)
    return [int.from_bytes(victim, "little") for victim in victims]


def test_lru_forgets_what_was_not_used_for_longest() -> None:
    policy = Lru()
    for number in (1, 2, 3):
        add(policy, number)
    policy.touched(key(1), 1.0)
    assert evict(policy, 2) == [2, 3]


def test_s3_fifo_finds_room_where_every_block_moves_to_the_main_queue_first() -> None:
    policy = S3Fifo(CAPACITY)
    add(policy, 1)
    for _ in range(2):
        policy.touched(key(1), 1.0)
    assert evict(policy) == [1]


@pytest.mark.parametrize("make", [Arc, S3Fifo, TinyLfu])
def test_what_is_used_again_survives_a_scan(make: Callable[[int], EvictionPolicy]) -> None:
    """Many blocks that are used once do not push out those that are used often; in LRU they do."""

    def survivors(policy: EvictionPolicy) -> int:
        hot, here = set(range(CAPACITY // 2)), set[int]()
        for number in hot:
            add(policy, number)
            here.add(number)
        for _ in range(4):
            for number in hot:
                policy.touched(key(number), 0.0)
        for number in range(1000, 1000 + 5 * CAPACITY):
            if len(here) >= CAPACITY:
                here -= set(evict(policy))
            add(policy, number)
            here.add(number)
        return len(hot & here)

    assert survivors(make(CAPACITY)) >= 0.9 * CAPACITY // 2  # some policies estimate
    assert survivors(Lru()) == 0


def test_leaf_first_takes_ends_before_beginnings() -> None:
    policy = LeafFirst()
    add(policy, 1)
    add(policy, 2, parent=1)
    add(policy, 3, parent=2)
    add(policy, 4, parent=1)
    policy.touched(key(4), 1.0)
    assert evict(policy, 2) == [3, 2], "1 was not used for longest, but 4 follows on it"
    assert evict(policy, 2) == [4, 1]


def test_arc_learns_from_what_it_regrets() -> None:
    """A block that comes back after it was evicted counts as used again, and new ones get room."""
    policy = Arc(2)
    add(policy, 1)
    add(policy, 2)
    policy.touched(key(2), 0.0)
    assert evict(policy) == [1]
    add(policy, 1)
    add(policy, 3)
    assert evict(policy) == [2]


def test_a_sketch_counts_and_forgets() -> None:
    sketch = FrequencySketch(64)
    for _ in range(8):
        sketch.add(key(1))
    sketch.add(key(2))
    assert sketch.of(key(1)) == 8
    assert sketch.of(key(2)) >= 1
    for number in range(1000, 1640):
        sketch.add(key(number))
    assert sketch.of(key(1)) < 15
    assert sum(sketch.of(key(number)) for number in range(5000, 5050)) < 50 * 8


def test_every_policy_is_offered_as_a_plugin() -> None:
    kinds = load_plugins().evictions.kinds
    assert {"lru", "tinylfu", "s3fifo", "arc", "leaf_first"} <= set(kinds)
    for name in ("lru", "tinylfu", "s3fifo", "arc", "leaf_first"):
        kind = kinds[name]
        assert kind.origin.distribution == "commutator-eviction"
        policy = kind.thing(kind.config_class(kind=name), 10)
        add(policy, 1)
        assert evict(policy) == [1]
    small = kinds["s3fifo"].thing(S3FifoConfig(kind="s3fifo", small=0.5), 10)
    for number in range(8):
        add(small, number)
    assert evict(small) == [0]
