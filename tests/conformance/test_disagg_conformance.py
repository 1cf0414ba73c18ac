"""Every policy of prefill and decode apart passes the shipped suite."""

from __future__ import annotations

from commutator import DisaggPolicy
from commutator.testing import DisaggContract
from commutator_disagg import (
    Always,
    Conditional,
    ConditionalConfig,
    Cost,
    CostConfig,
    FixedConfig,
    Never,
)


class TestAlways(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Always(FixedConfig(kind="always"))


class TestNever(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Never(FixedConfig(kind="never"))


class TestConditional(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Conditional(ConditionalConfig(kind="conditional", max_local_uncached_ratio=0.7))


class TestCost(DisaggContract):
    def make_policy(self) -> DisaggPolicy:
        return Cost(CostConfig(kind="cost"))
