"""What is told of a worker's starts: while it starts, fails, dies, is silent, and is back."""

from __future__ import annotations

import asyncio

from tests.support.front_door import FakeDispatcher, make_services

from commutator.frontend.process import follow_supervisor
from commutator.registry.client import RegistryClient
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.registry.unready import StartLog, UnreadyState, UnreadyWorker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def worker(name: str = "w-0") -> UnreadyWorker:
    return UnreadyWorker(worker_id=name, model="m", kind="k", engine="e", since_unix_s=100.0)


def told(log: StartLog) -> tuple[str, str | None, float, int, float | None] | None:
    one = log.current
    if one is None:
        return None
    return one.state, one.cause, one.since_unix_s, one.failures, one.next_start_unix_s


def test_a_worker_that_starts_at_once() -> None:
    log = StartLog(worker())
    log.begins()
    assert told(log) == ("starting", None, 100.0, 0, None)
    assert log.current is not None
    assert log.current.problem is None
    log.waits("refused")
    assert told(log) == ("starting", "refused", 100.0, 0, None)
    log.ready()
    assert told(log) is None


def test_a_worker_that_fails_until_it_starts() -> None:
    clock = Clock()
    log = StartLog(worker(), clock)
    log.begins()
    clock.now_s = 101.0
    log.ended("exited with status 1", 0.5)
    assert told(log) == ("failing", "exited with status 1", 101.0, 1, 101.5)
    clock.now_s = 101.5
    log.begins()
    assert told(log) == ("failing", "exited with status 1", 101.0, 1, None), "it is being started"
    clock.now_s = 102.0
    log.ended("exited with status 2", 1.0)
    assert told(log) == ("failing", "exited with status 2", 101.0, 2, 103.0)
    assert log.current is not None
    assert log.current.problem == "worker w-0 is failing: exited with status 2"
    log.ready()
    assert told(log) is None


def test_a_worker_that_dies_and_then_cannot_start() -> None:
    clock = Clock()
    log = StartLog(worker(), clock)
    log.ready()
    clock.now_s = 150.0
    log.ended("was killed by SIGKILL", 0.5)
    assert told(log) == ("dead", "was killed by SIGKILL", 150.0, 0, 150.5)
    log.begins()
    clock.now_s = 151.0
    log.ended("exited with status 1", 1.0)
    assert told(log) == ("failing", "exited with status 1", 151.0, 1, 152.0)


def test_a_worker_that_is_silent_comes_back_or_is_started_again() -> None:
    clock = Clock()
    log = StartLog(worker(), clock)
    log.ready()
    clock.now_s = 120.0
    log.silent("does not answer: too slow")
    clock.now_s = 121.0
    log.silent("does not answer: too slow")
    assert told(log) == ("dead", "does not answer: too slow", 120.0, 0, None)
    log.ready()
    assert told(log) is None
    log.silent("does not answer: too slow")
    clock.now_s = 130.0
    log.ended("failed: gave no answer for too long", 0.5)
    assert told(log) == ("dead", "failed: gave no answer for too long", 121.0, 0, 130.5)


async def test_front_doors_learn_of_them_from_the_registrys_process() -> None:
    server = RegistryServer(MemoryRegistry())
    client = RegistryClient(await server.start())
    assert (await client.run_state()).unready == []
    log = StartLog(worker(), lambda: 101.0)
    log.ended("exited with status 1", 0.5)
    server.unready = lambda: [one for one in (log.current,) if one is not None]
    (found,) = (await client.run_state()).unready
    assert found == log.current
    assert found.state is UnreadyState.FAILING
    await client.close()
    await server.stop()


async def test_a_front_door_asks_at_once_when_a_worker_has_left() -> None:
    server = RegistryServer(MemoryRegistry())
    client = RegistryClient(await server.start())
    services, lost = make_services(FakeDispatcher()), asyncio.Event()
    asked, one = asyncio.Event(), worker()

    def unready() -> list[UnreadyWorker]:
        asked.set()
        return [one]

    server.unready = unready
    following = asyncio.create_task(follow_supervisor(client, services, lost, every_s=3600.0))
    await asyncio.wait_for(asked.wait(), 30)
    one = worker("w-1")
    lost.set()
    async with asyncio.timeout(30):
        while [known.worker_id for known in services.unready] != ["w-1"]:
            await asyncio.sleep(0.005)
    following.cancel()
    await client.close()
    await server.stop()
