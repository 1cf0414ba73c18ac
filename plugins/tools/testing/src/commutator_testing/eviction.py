"""The conformance suite for eviction policies: subclass it, define a factory, run pytest."""

from __future__ import annotations

import pickle
import time

from hypothesis import given
from hypothesis import strategies as st

from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_testing.profile import suite_settings

_BLOCKS = 40

_CAPACITY = 12


def tree_block(number: int) -> tuple[BlockKey, BlockKey | None, RetentionHints]:
    """Key, parent and hints of a block of a binary tree of prefixes, numbered from 1."""
    parent = number // 2
    depth = number.bit_length() - 1
    return _key(number), _key(parent) if parent else None, RetentionHints(depth=depth)


def _key(number: int) -> BlockKey:
    return number.to_bytes(32, "little")


_numbers = st.integers(1, _BLOCKS)

_steps = st.one_of(
    st.tuples(st.just("add"), _numbers),
    st.tuples(st.just("touch"), _numbers),
    st.tuples(st.just("lose"), _numbers),
    st.tuples(st.just("evict"), st.integers(0, _BLOCKS), st.frozensets(_numbers)),
)

Step = tuple[str, int] | tuple[str, int, frozenset[int]]

History = list[Step]

_histories = st.lists(_steps, max_size=80)

_settings = suite_settings(100)


class EvictionContract:
    """What every eviction policy must do."""

    documented_in = (
        "EvictionPolicy in docs/reference/contract/eviction.md and docs/how-to/write-a-tier.md"
    )

    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    @_settings
    @given(_histories)
    def test_finds_room_among_what_may_go_and_nowhere_else(self, history: History) -> None:
        self._replay(self.make_policy(_CAPACITY), history)

    @_settings
    @given(_histories)
    def test_equal_histories_give_equal_victims(self, history: History) -> None:
        first = self._replay(self.make_policy(_CAPACITY), history)
        assert self._replay(self.make_policy(_CAPACITY), history) == first

    def test_unknown_blocks_are_ignored(self) -> None:
        policy = self.make_policy(_CAPACITY)
        for evicted in (False, True):
            policy.touched(_key(1), 0.0)
            policy.removed(_key(1), evicted=evicted)
        assert policy.victims(1, lambda _: True, 0.0) == []

    def test_what_is_gone_is_forgotten_in_time(self) -> None:
        """A policy's memory does not grow with the number of blocks that passed."""
        policy = self.make_policy(_CAPACITY)
        sizes = []
        for number in range(1, 200 * _CAPACITY):
            policy.added(*tree_block(number), float(number))
            if number > _CAPACITY:
                for key in policy.victims(1, lambda _: True, float(number)):
                    policy.removed(key, evicted=True)
            sizes.append(len(pickle.dumps(policy)))
        assert sizes[-1] < 1.5 * max(sizes[: 20 * _CAPACITY]) + 1024

    def test_what_comes_and_goes_is_forgotten_in_time(self) -> None:
        """A policy's memory does not grow when the same few blocks return again and again."""
        policy, sizes = self.make_policy(_CAPACITY), []
        for turn in range(200):
            for number in range(1, _CAPACITY):
                policy.added(*tree_block(number), float(turn))
                policy.touched(tree_block(number)[0], float(turn))
            for number in range(1, _CAPACITY):
                policy.removed(tree_block(number)[0], evicted=number % 2 == 0)
            sizes.append(len(pickle.dumps(policy)))
        assert sizes[-1] < 1.5 * max(sizes[:20]) + 1024

    def test_one_victim_is_found_without_looking_at_every_block(self) -> None:
        policy, looked, total = self.make_policy(5000), 0, 5000

        def evictable(_: BlockKey) -> bool:
            nonlocal looked
            looked += 1
            return True

        for number in range(1, total + 1):
            policy.added(*tree_block(number), 0.0)
        for number in range(100):
            (victim,) = policy.victims(1, evictable, 0.0)
            policy.removed(victim, evicted=True)
            policy.added(*tree_block(total + 1 + number), 0.0)
        assert looked <= 100 * 50, f"{looked / 100:.0f} of {total} blocks were visited for one"

    def test_an_eviction_costs_hardly_more_in_a_larger_tier(self) -> None:
        """O(1) or O(log n): a policy that sorts or scans its blocks now and then is too slow."""
        small_s, large_s = self._eviction_s(1_000), self._eviction_s(32_000)
        assert large_s < 8 * small_s + 20e-6, (
            f"one eviction takes {large_s * 1e6:.0f} us with 32,000 blocks, {small_s * 1e6:.0f} us "
            "with 1,000"
        )

    def _eviction_s(self, blocks: int) -> float:
        """Processor time of an eviction: the mean of 50, in the quickest of three fifties.

        Other load hardly changes it. Rare work, such as tidying up once in as many evictions as
        there are blocks, does not count, as most fifties have none of it.
        """
        policy, quickest_s = self.make_policy(blocks), float("inf")
        for number in range(1, blocks + 1):
            policy.added(*tree_block(number), 0.0)
        for first in range(blocks + 1, blocks + 151, 50):
            spent_s = 0.0
            for number in range(first, first + 50):
                begun_s = time.thread_time()
                (victim,) = policy.victims(1, lambda _: True, 0.0)
                policy.removed(victim, evicted=True)
                spent_s += time.thread_time() - begun_s
                policy.added(*tree_block(number), 0.0)
            quickest_s = min(quickest_s, spent_s / 50)
        return quickest_s

    def _replay(self, policy: EvictionPolicy, history: History) -> list[list[BlockKey]]:
        """All victims that the policy chose; asserts that each choice was allowed."""
        known: set[BlockKey] = set()
        chosen: list[list[BlockKey]] = []
        for now_s, step in enumerate(history):
            key, parent, facts = tree_block(step[1])
            if step[0] == "add" and key not in known:
                policy.added(key, parent, facts, now_s)
                known.add(key)
            elif step[0] == "touch":
                policy.touched(key, now_s)
            elif step[0] == "lose":
                policy.removed(key, evicted=False)
                known.discard(key)
            elif len(step) > 2:
                held = {_key(number) for number in step[2]}
                victims = policy.victims(step[1], lambda k: k not in held, now_s)  # noqa: B023
                assert set(victims) <= known, "a victim is not in the tier"
                assert not set(victims) & held, "a victim must stay"
                assert len(set(victims)) == len(victims), "a victim is named twice"
                assert len(victims) == min(step[1], len(known - held)), "room was not found"
                for victim in victims:
                    policy.removed(victim, evicted=True)
                known -= set(victims)
                chosen.append(victims)
        return chosen
