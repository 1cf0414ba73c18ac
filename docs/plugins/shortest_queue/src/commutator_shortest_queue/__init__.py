"""Routes each request to the worker with the fewest requests in flight."""

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
    setting,
)


@frozen(kw_only=True)
class ShortestQueueConfig(RouterConfig):
    """Options of the policy; they stand in the YAML file beside `kind`."""

    prefill_weight: float = setting("Requests that 1,000 waiting prompt tokens count as.", 1.0)


class ShortestQueue(RoutingPolicy):
    """Counts requests in flight, and prompt tokens still to be computed."""

    def __init__(self, config: ShortestQueueConfig) -> None:
        self._prefill_weight = config.prefill_weight

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        queues = {c.worker_id: self._queue(c) for c in candidates}
        shortest = min(queues.values())
        tied = [worker_id for worker_id, queue in queues.items() if queue == shortest]
        return Decision(
            worker_id=rng.choice(tied),
            policy="shortest_queue",
            reason=f"shortest queue ({shortest:g}) of {len(candidates)} workers",
            scores={worker_id: {"queue": queue} for worker_id, queue in queues.items()},
        )

    def _queue(self, candidate: Candidate) -> float:
        load = candidate.load
        return load.active_requests + self._prefill_weight * load.active_prefill_tokens / 1000


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("shortest_queue", ShortestQueueConfig, ShortestQueue, stability="beta")
