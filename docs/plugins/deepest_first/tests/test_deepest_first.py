"""The shipped suite, and the one thing that is this policy's own."""

from __future__ import annotations

from commutator import EvictionPolicy
from commutator_deepest_first import DeepestFirst
from commutator_testing.eviction import EvictionContract, tree_block


class TestDeepestFirst(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return DeepestFirst()

    def test_the_deepest_goes_first(self) -> None:
        policy = self.make_policy(8)
        for number in (1, 8, 4, 2):
            policy.added(*tree_block(number), 0.0)
        policy.touched(tree_block(8)[0], 1.0)
        assert policy.victims(2, lambda _: True, 2.0) == [tree_block(8)[0], tree_block(4)[0]]
