"""Decisions over more workers than are looked at one by one: what is said of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from commutator.contract.request import RequestSummary
from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RoutingPolicy,
)
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import FALLBACK, ModelRouter
from commutator_console.route import show
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_replay.fleet import virtual_live_worker

WORKERS = tuple(virtual_live_worker(f"w-{number:03}", 16) for number in range(200))
HASHES = list(range(10))
SUMMARY = RequestSummary(request_id="r", model="model", prompt_tokens=170, max_tokens=1)


class Broken(RoutingPolicy):
    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        raise ArithmeticError("no choice")


class World:
    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.load = InFlightLoad()
        self.indexer = KvIndexer(RouterConfig(kind="kv", block_size=16))
        policy = policy or KvRouter(KvRouterConfig(kind="kv"))
        self.router = ModelRouter(policy, self.indexer, self.load, random.Random(1), 16)
        for number, worker in enumerate(WORKERS):
            for _ in range(1 + number % 3):
                self.load.dispatch(worker.record.worker_id, 1_000, 16)
        self.indexer.index.store("w-001", HASHES)


def test_who_was_not_scored_is_counted() -> None:
    route = World().router.route(SUMMARY, HASHES, WORKERS)
    explained = route.explain()
    assert route.decision.worker_id.startswith("w-")
    assert len(route.decision.scores) < 10
    assert explained["not_scored"] == 200 - len(route.decision.scores)
    assert len(explained["candidates"]) + explained["left_out"] == 200
    assert explained["best_overlap_blocks"] == 10
    others = explained["not_scored"]
    assert f"{others} others cost at least" in explained["reason"]


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    busy = BusyConfig(max_active_requests=3)
    route = world.router.route_to_free(SUMMARY, HASHES, WORKERS, busy)
    assert route is not None
    assert route.explain()["too_busy"] == {"max_active_requests": 66}
    show(route.explain())
    shown = capsys.readouterr().out
    assert f"and {route.decision.not_scored} more that were not scored" in shown
    assert "and 66 busy by max_active_requests" in shown


def test_none_is_free() -> None:
    world = World()
    busy = BusyConfig(max_active_requests=1)
    for workers in (WORKERS, list(WORKERS)):
        assert world.router.route_to_free(SUMMARY, HASHES, workers, busy) is None
        assert world.router.hits(workers, busy) == {"max_active_requests": 200}


def test_a_list_of_workers_may_change() -> None:
    world, workers = World(), list(WORKERS)
    before = world.router.route(SUMMARY, HASHES, workers).worker
    workers.remove(before)
    assert world.router.route(SUMMARY, HASHES, workers).worker is not before


def test_a_policy_that_fails_fails_no_request() -> None:
    world = World(Broken())
    world.load.dispatch("w-000", 1, 16)
    route = world.router.route(SUMMARY, HASHES, WORKERS)
    assert route.decision.policy == FALLBACK
    assert route.candidate.load.active_requests == 1
    assert "Broken raised ArithmeticError: no choice" in route.explain()["reason"]
