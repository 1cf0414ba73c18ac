"""Which workers a front door sends requests to while a fleet changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.support.supervised import INFO

from commutator.contract.worker import EngineInfo, Role, WorkerRecord
from commutator.errors import EngineUnavailableError
from commutator.routing.workers import LiveWorkers


class Client:
    """Connects when the test lets it."""

    def __init__(self, *, reachable: bool = True) -> None:
        self.reached = asyncio.Event()
        if reachable:
            self.reached.set()
        self.fails = False
        self.answers = True
        self.changed: Callable[[], None] = lambda: None

    def watch_answers(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def start(self) -> EngineInfo:
        await self.reached.wait()
        if self.fails:
            raise EngineUnavailableError("gone")
        return INFO

    async def close(self) -> None:
        pass


def record(name: str, *, draining: bool = False) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name, engine="e", kind="k", model="m", address="a", info=INFO, draining=draining
    )


def routable(workers: LiveWorkers) -> list[str]:
    return [one.record.worker_id for one in workers.routable("m")]


async def test_a_draining_worker_serves_until_the_one_that_replaces_it_is_connected() -> None:
    workers = LiveWorkers()
    old = await workers.put(record("old"), cast(Any, Client()))
    client = Client(reachable=False)
    adding = asyncio.create_task(workers.put(record("new"), cast(Any, client)))
    await asyncio.sleep(0)
    workers.change(old, draining=True, role=Role.BOTH)
    assert routable(workers) == ["old"], "the registry has a ready worker, so none is refused"
    client.reached.set()
    new = await adding
    assert routable(workers) == ["new"]
    client.fails = True
    workers.lost(new)
    assert routable(workers) == [], "the drain is over, whatever becomes of the other one"
    await workers.close()


async def test_a_worker_that_is_drained_without_another_gets_nothing() -> None:
    workers = LiveWorkers()
    await workers.put(record("old", draining=True), cast(Any, Client()))
    assert routable(workers) == []
    await workers.close()


async def test_a_worker_that_owes_an_answer_gets_nothing_while_others_answer() -> None:
    routed = 0

    def note() -> None:
        nonlocal routed
        routed += 1

    workers = LiveWorkers(note)
    one, other = Client(), Client()
    await workers.put(record("a"), cast(Any, one))
    await workers.put(record("b"), cast(Any, other))
    assert routable(workers) == ["a", "b"]
    one.answers = False
    one.changed()
    assert routable(workers) == ["b"]
    other.answers = False
    other.changed()
    assert routable(workers) == ["a", "b"]
    before, one.answers = routed, True
    one.changed()
    assert routable(workers) == ["a"]
    assert routed == before + 1, "those that wait for a worker look again"
    await workers.close()


async def test_a_worker_that_stays_unreachable_is_logged_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    workers = LiveWorkers()
    client = Client()
    worker = await workers.put(record("w"), cast(Any, client))
    for _ in range(2):
        caplog.clear()
        client.fails = True
        workers.lost(worker)
        async with asyncio.timeout(30):
            while worker.failures < 3:
                await asyncio.sleep(0.01)
        client.fails = False
        async with asyncio.timeout(30):
            while not worker.connected:
                await asyncio.sleep(0.01)
        assert [one.message for one in caplog.records] == [
            "worker w: connecting failed: gone",
            "worker w: connected at last",
        ]
    await workers.close()
