"""Calls on a tier's thread: their results, their errors, and a tier that is not open."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from commutator.errors import TierError
from commutator.kv.tier_call import on_tier
from commutator.kv.tier_thread import Job, JobUrgency, TierThread
from commutator.kv.tier_worker import TierWorker


class Queue:
    """Stands in for the thread: runs jobs when told to, with a worker or without."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, urgency: JobUrgency, job: Job) -> None:
        assert urgency is JobUrgency.FREE
        self.jobs.append(job)

    def run(self, worker: object = "a worker") -> None:
        for _ in self.jobs.pop(0)(cast("TierWorker | None", worker)):
            pass


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


def test_a_tier_that_is_not_open_is_told() -> None:
    queue = Queue()
    future = call(queue, lambda: 7)
    queue.run(None)
    with pytest.raises(TierError, match="not open"):
        future.result(0)


def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    queue, done = Queue(), list[int]()
    future = call(queue, lambda: done.append(1))
    assert future.cancel()
    queue.run()
    assert not done
