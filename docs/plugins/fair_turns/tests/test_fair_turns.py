"""The shipped suite, and the one thing that is this policy's own."""

from __future__ import annotations

from commutator.contract.fairness import FairnessPolicy
from commutator_fair_turns import FairTurns
from commutator_testing.fairness import FairnessContract


class TestFairTurns(FairnessContract):
    def make_policy(self) -> FairnessPolicy:
        return FairTurns()

    def test_the_team_served_longest_ago_is_next(self) -> None:
        policy = self.make_policy()
        for principal in ("red.1", "blue.1", "red.2"):
            policy.admitted(policy.flow(principal))
        ranks = [policy.rank(policy.flow(name)) for name in ("green.1", "blue.9", "red.1")]
        assert ranks == sorted(set(ranks))
