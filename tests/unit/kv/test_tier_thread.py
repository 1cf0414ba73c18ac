"""A tier's thread: urgent jobs first, whatever fails, and an end that leaves no caller waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import pytest
from tests.support.kv_rig import wait_for

from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.tiers.executor import Job, TierExecutor, TierThread
from commutator_engine_kit.kv.tiers.guards import Breaker


class Setup:
    name = "test"

    def __init__(self) -> None:
        self.breaker = Breaker(max_failures=1, pause_s=0.3)


class Worker:
    """Only what the thread itself uses."""

    def __init__(self) -> None:
        self.setup = Setup()
        self.is_open = False
        self.problems: list[Exception] = []
        self.opened = self.reaped = 0
        self.closed = False

    def open(self) -> None:
        self.opened += 1
        if self.problems:
            raise self.problems.pop(0)
        self.is_open = True

    def reap(self) -> None:
        self.reaped += 1

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self) -> None:
        self.worker = Worker()
        self.states: list[str] = []
        self.done: list[str] = []
        self.thread = TierThread(
            cast("TierExecutor", self.worker),
            on_up=lambda: self.states.append("up"),
            on_down=lambda _: self.states.append("down"),
        )

    def job(self, name: str, parts: int = 1, then: Callable[[], Any] = lambda: None) -> Job:
        def run(worker: TierExecutor | None) -> Generator[None, None, None]:
            try:
                for part in range(parts):
                    if part:
                        yield
                    self.done.append(f"{name}{part or ''}" if worker else f"{name} without")
                    then()
            finally:
                self.done.append(f"{name}.")

        return run

    def submit(self, urgency: JobUrgency, name: str, **options: Any) -> None:
        self.thread.submit(urgency, self.job(name, **options))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.thread.stop()
    rig.thread.join(5)


def test_the_most_urgent_goes_first_also_between_the_parts_of_others(rig: Rig) -> None:
    wait = threading.Event()
    rig.submit(JobUrgency.OFFLOAD, "store", parts=3, then=lambda: wait.wait(5))
    rig.thread.start()
    wait_for(lambda: rig.done)
    rig.submit(JobUrgency.PREFETCH, "prefetch")
    rig.submit(JobUrgency.OFFLOAD, "later")
    rig.submit(JobUrgency.LOAD, "load")
    rig.submit(JobUrgency.FREE, "free")
    wait.set()
    wait_for(lambda: "prefetch." in rig.done)
    assert [word for word in rig.done if not word.endswith(".")] == [
        "store", "free", "load", "store1", "store2", "later", "prefetch",
    ]  # fmt: skip


def test_one_job_that_fails_does_not_harm_the_next(rig: Rig) -> None:
    rig.thread.start()
    rig.submit(JobUrgency.LOAD, "bad", then=lambda: 1 / 0)
    rig.submit(JobUrgency.LOAD, "good")
    wait_for(lambda: "good." in rig.done)
    assert rig.done == ["bad", "bad.", "good", "good."]


def test_what_cannot_be_opened_is_tried_again_and_jobs_do_without_meanwhile(rig: Rig) -> None:
    rig.worker.problems = [TierError("no disk"), OSError("no disk"), RuntimeError("a bug")]
    rig.thread.start()
    assert rig.thread.tried.wait(5)
    assert not rig.thread.usable
    rig.submit(JobUrgency.LOAD, "load")
    wait_for(lambda: rig.done == ["load without", "load."])
    wait_for(lambda: rig.thread.usable, 10)
    assert rig.worker.opened == 4
    assert rig.states == ["up"]
    rig.submit(JobUrgency.LOAD, "load")
    wait_for(lambda: rig.done[2:] == ["load", "load."])


def test_an_open_breaker_is_reported_and_so_is_the_end_of_its_pause(rig: Rig) -> None:
    rig.thread.start()
    wait_for(lambda: rig.states == ["up"])
    rig.worker.setup.breaker.failed(time.monotonic())
    wait_for(lambda: rig.states == ["up", "down", "up"])


def test_the_thread_outlives_whatever_is_thrown_at_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.thread.start()
    wait_for(lambda: rig.thread.usable)
    monkeypatch.setattr(rig.worker, "reap", lambda: 1 / 0)
    rig.submit(JobUrgency.LOAD, "load")
    wait_for(lambda: "load." in rig.done)
    rig.submit(JobUrgency.LOAD, "again")
    wait_for(lambda: "again." in rig.done)


def test_stop_ends_what_runs_and_tells_what_waits(rig: Rig) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(5)

    rig.thread.start()
    rig.submit(JobUrgency.OFFLOAD, "long", parts=100, then=wait)
    rig.submit(JobUrgency.OFFLOAD, "waits", then=lambda: 1 / 0)
    rig.submit(JobUrgency.OFFLOAD, "waits too")
    assert begun.wait(5)
    rig.thread.stop()
    go.set()
    rig.thread.join(5)
    assert rig.done == [
        "long", "long.", "waits without", "waits.", "waits too without", "waits too.",
    ]  # fmt: skip
    assert rig.worker.closed
    rig.submit(JobUrgency.LOAD, "too late")
    assert rig.done[-2:] == ["too late without", "too late."]


def test_a_thread_that_never_began_can_be_stopped() -> None:
    rig = Rig()
    rig.thread.stop()
    rig.thread.join(0.1)
    rig.submit(JobUrgency.LOAD, "load")
    assert rig.done == ["load without", "load."]
