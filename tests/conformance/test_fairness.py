"""Every fairness policy that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator.contract.fairness import FairnessPolicy
from commutator.fairness import Fifo, Guarded, Weighted
from commutator_testing.fairness import FairnessContract


class TestWeighted(FairnessContract):
    def make_policy(self) -> FairnessPolicy:
        return Weighted()


class TestWeightedByPromptsAlone(FairnessContract):
    def make_policy(self) -> FairnessPolicy:
        return Weighted(generated_token_weight=0.0)


class TestFifo(FairnessContract):
    def make_policy(self) -> FairnessPolicy:
        return Fifo()


class TestGuarded(FairnessContract):
    def make_policy(self) -> FairnessPolicy:
        return Guarded(Weighted())
