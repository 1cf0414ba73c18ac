"""Every policy that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator import RoutingPolicy
from commutator.testing import RouterContract
from commutator_round_robin import RoundRobin, RoundRobinConfig


class TestRoundRobin(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return RoundRobin(RoundRobinConfig(kind="round_robin"))
