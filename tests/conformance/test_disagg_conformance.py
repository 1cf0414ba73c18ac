"""Every policy of prefill and decode apart passes the shipped suite."""

from __future__ import annotations

from commutator.contract.disagg import DisaggPolicy
from commutator_disagg import (
    Always,
    Conditional,
    ConditionalConfig,
    Cost,
    CostConfig,
    Never,
)
from commutator_testing.disagg import DisaggContract


class TestAlways(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Always()


class TestNever(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Never()


class TestConditional(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Conditional(ConditionalConfig(kind="conditional", max_local_uncached_ratio=0.7))


class TestCost(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Cost(CostConfig(kind="cost"))
