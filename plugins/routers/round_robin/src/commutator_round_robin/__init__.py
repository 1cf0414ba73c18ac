"""Round-robin routing: the smallest policy there is."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

from commutator import (
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    hookimpl,
)


class RoundRobin(RoutingPolicy):
    """Takes the workers in turn, by id."""

    def __init__(self) -> None:
        self._last = ("", 0)

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        # Going by id rather than by a counter keeps the turn fair while workers come and go.
        after = bisect_right(candidates, self._last, key=_place)
        chosen = candidates[after % len(candidates)]
        self._last = _place(chosen)
        return Decision(
            worker_id=chosen.worker_id,
            policy="round_robin",
            reason=f"next in turn among {len(candidates)} workers",
        )


def _place(candidate: Candidate) -> tuple[str, int]:
    """What candidates are ordered by; the names of ranks are not in this order."""
    return candidate.worker.worker_id, candidate.rank


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("round_robin", RouterConfig, lambda _: RoundRobin(), stability="stable")
