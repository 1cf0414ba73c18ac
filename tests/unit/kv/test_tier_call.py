"""Calls on a tier's thread: their results, their errors, and a tier that is not open."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.lending import on_tier
from commutator_engine_kit.kv.tiers.executor import Job, TierThread


class Queue:
    """Stands in for the thread: runs jobs when told to, with a worker or without."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, urgency: JobUrgency, job: Job) -> None:
        assert urgency is JobUrgency.FREE
        self.jobs.append(job)

    def run(self, worker: object = "a worker") -> None:
        self.jobs.pop(0)(cast("Any", worker))


def call(queue: Queue, what: Callable[[], Any]) -> Future[Any]:
    return on_tier(cast("TierThread", queue))(what)


def test_the_result_comes_back_once_the_thread_got_to_it() -> None:
    queue = Queue()
    future = call(queue, lambda: 7)
    assert not future.done()
    queue.run()
    assert future.result(0) == 7


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    queue = Queue()
    future = call(queue, lambda: 1 / 0)
    queue.run()
    with pytest.raises(ZeroDivisionError):
        future.result(0)


def test_a_tier_that_is_not_open_is_an_error() -> None:
    queue = Queue()
    future = call(queue, lambda: 7)
    queue.run(None)
    with pytest.raises(TierError, match="not open"):
        future.result(0)


def test_calls_that_were_given_up_are_not_made() -> None:
    queue, done = Queue(), list[int]()
    future = call(queue, lambda: done.append(1))
    assert future.cancel()
    queue.run()
    assert not done
