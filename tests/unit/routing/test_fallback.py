"""A policy that fails: requests are served all the same, and it is told."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from commutator.errors import RoutingError
from commutator.routing.contract import Candidate, Decision, RouteRequest, RoutingPolicy
from commutator.routing.fallback import FALLBACK
from commutator.routing.load import InFlightLoad
from commutator.routing.pool import ModelPool
from commutator.routing.virtual_worker import virtual_live_worker
from commutator.types import RequestSummary

SUMMARY = RequestSummary("r", "m", 100, 10)
WORKERS = [virtual_live_worker(f"w-{i}") for i in range(3)]

Answer = Callable[[Sequence[Candidate]], Any]


class Broken(RoutingPolicy):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        answer: Decision = self._answer(candidates)
        return answer


def division(candidates: Sequence[Candidate]) -> Decision:
    return Decision(str(1 // (len(candidates) - 3)), "broken", "never")


def pool(answer: Answer, *, strict: bool = False) -> ModelPool[Any]:
    load = InFlightLoad()
    for worker_id in ("w-0", "w-2"):
        load.dispatch(worker_id, 100, 16)
    return ModelPool(Broken(answer), None, load, random.Random(1), 16, strict=strict)


FAILURES = pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (division, "raised ZeroDivisionError"),
        (lambda _: Decision("gone", "broken", "x"), "picked 'gone', which is no candidate"),
        (lambda _: None, "raised AttributeError"),
    ],
)


@FAILURES
def test_the_request_goes_to_the_worker_with_the_fewest(
    answer: Answer, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    route = pool(answer).route(SUMMARY, (), WORKERS)
    assert (route.decision.worker_id, route.decision.policy) == ("w-1", FALLBACK)
    assert route.worker is WORKERS[1]
    assert f"routing policy Broken {problem}" in route.explain()["reason"]
    assert problem in caplog.text


@FAILURES
def test_a_replay_stops_instead(answer: Answer, problem: str) -> None:
    with pytest.raises(RoutingError, match=problem):
        pool(answer, strict=True).route(SUMMARY, (), WORKERS)


def test_a_worker_that_vanished_is_not_waited_for() -> None:
    """The policy remembers it; by the time of its choice it is no candidate any more."""
    remembers = pool(lambda _: Decision("w-1", "broken", "it was there before"))
    assert remembers.route(SUMMARY, (), WORKERS).worker is WORKERS[1]
    left = remembers.route(SUMMARY, (), [WORKERS[0], WORKERS[2]])
    assert left.worker in (WORKERS[0], WORKERS[2])


def test_many_failures_are_not_each_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    broken = pool(division)
    chosen = {broken.route(SUMMARY, (), [WORKERS[0], *WORKERS[2:], WORKERS[1]]).worker.record
              .worker_id for _ in range(1500)}  # fmt: skip
    assert chosen == {"w-1"}
    assert len(caplog.records) == 2
