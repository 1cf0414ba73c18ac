"""Round-robin routing: the smallest policy there is."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import frozen

from commutator import (
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    hookimpl,
)


@frozen(kw_only=True)
class RoundRobinConfig(RouterConfig):
    """Round robin has no options."""


class RoundRobin(RoutingPolicy):
    """Takes the workers in turn, by id."""

    def __init__(self, config: RoundRobinConfig) -> None:
        del config
        self._last = ""

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        # Going by id rather than by a counter keeps the turn fair while workers come and go.
        after = (c for c in candidates if c.worker_id > self._last)
        chosen = next(after, candidates[0])
        self._last = chosen.worker_id
        return Decision(
            worker_id=chosen.worker_id,
            policy="round_robin",
            reason=f"next in turn among {len(candidates)} workers",
        )


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("round_robin", RoundRobinConfig, RoundRobin, stability="stable")
