"""The shipped suite, and the one thing that is this policy's own."""

from __future__ import annotations

import random

from commutator import RouteRequest, RoutingPolicy, WorkerLoad
from commutator_shortest_queue import ShortestQueue, ShortestQueueConfig
from commutator_testing.routers import RouterContract, make_candidate


class TestShortestQueue(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return ShortestQueue(ShortestQueueConfig(kind="shortest_queue"))

    def test_takes_the_shortest_queue(self) -> None:
        busy, idle = WorkerLoad(active_requests=5), WorkerLoad(active_requests=1)
        candidates = [make_candidate("w-0", busy), make_candidate("w-1", idle)]
        request = RouteRequest(request_id="r", model="model", prompt_tokens=10)
        decision = self.make_policy().pick(request, candidates, random.Random())
        assert decision.worker_id == "w-1"
