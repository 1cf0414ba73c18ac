"""The router `named`: a front door beside a worker serves where an endpoint picker decided."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commutator import Candidate, Decision, RouteRequest, RoutingPolicy

WORKER_HEADER = "x-commutator-worker"
"""Names the chosen worker to the front door beside it."""


class Named(RoutingPolicy):
    """Takes the worker that the header names, else the one with the fewest requests.

    Without the header, or when that worker is gone: a request that lost its worker goes on.
    """

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        named = request.headers.get(WORKER_HEADER)
        for one in candidates:
            if named is not None and one.worker.worker_id == named:
                return _decided(one, f"{WORKER_HEADER} names it")
        fewest = min(one.load.active_requests for one in candidates)
        idle = [one for one in candidates if one.load.active_requests == fewest]
        why = "no worker is named" if named is None else f"{named[:80]} is not ready"
        return _decided(rng.choice(idle), f"{why}; it has the fewest requests")


def _decided(candidate: Candidate, reason: str) -> Decision:
    return Decision(worker_id=candidate.worker_id, policy="named", reason=reason)
