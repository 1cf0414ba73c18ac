"""A policy that fails: requests are served all the same, and the failure is reported."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from commutator.contract.request import RequestSummary
from commutator.contract.routing import Candidate, Decision, RouteRequest, RoutingPolicy
from commutator.errors import RoutingError
from commutator.routing.load import InFlightLoad
from commutator.routing.router import FALLBACK, ModelRouter
from commutator_replay.fleet import virtual_live_worker

SUMMARY = RequestSummary(request_id="r", model="m", prompt_tokens=100, max_tokens=10)
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
    return Decision(worker_id=str(1 // (len(candidates) - 3)), policy="broken", reason="never")


def pool(answer: Answer, *, strict: bool = False) -> ModelRouter:
    load = InFlightLoad()
    for worker_id in ("w-0", "w-2"):
        load.dispatch(worker_id, 100, 16)
    return ModelRouter(Broken(answer), None, load, random.Random(1), 16, strict=strict)


FAILURES = pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (division, "raised ZeroDivisionError"),
        (
            lambda _: Decision(worker_id="gone", policy="broken", reason="x"),
            "chose 'gone', which is not a candidate",
        ),
        (lambda _: None, "returned NoneType, not a Decision"),
        (lambda candidates: candidates[0].worker_id, "returned str, not a Decision"),
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
    remembers = pool(
        lambda _: Decision(worker_id="w-1", policy="broken", reason="it was there before")
    )
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


def test_a_second_bug_shows_beside_the_first(caplog: pytest.LogCaptureFixture) -> None:
    def at_another_line(candidates: Sequence[Candidate]) -> Decision:
        return Decision(worker_id=str(2 // (len(candidates) - 3)), policy="broken", reason="never")

    def an_empty_list(_: Sequence[Candidate]) -> Any:
        return [].pop()

    answers: list[Answer] = [division, at_another_line, an_empty_list, lambda _: 1, lambda _: "w-1"]
    calls = iter(answers * 3)
    broken = pool(lambda candidates: next(calls)(candidates))  # noqa: PLW0108 - a new one each time
    for _ in range(3 * len(answers)):
        broken.route(SUMMARY, (), WORKERS)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition("Broken ")[2].partition(";")[0] for line in said] == [
        "raised ZeroDivisionError: integer division or modulo by zero",
        "raised ZeroDivisionError: integer division or modulo by zero",
        "raised IndexError: pop from empty list",
        "returned int, not a Decision",
    ]


def test_failures_of_very_many_kinds_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lines = iter(range(1000))

    def somewhere(_: Sequence[Candidate]) -> None:
        exec(compile("\n" * next(lines) + "1 / 0", "generated", "exec"))

    broken = pool(somewhere)
    for _ in range(1000):
        broken.route(SUMMARY, (), WORKERS)
    assert len(caplog.records) == 101
