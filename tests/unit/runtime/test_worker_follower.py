"""Changes reach the dispatcher in order for each worker, and no worker waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from commutator.runtime.lease import Change, Down, Up
from commutator.runtime.worker_follower import WorkerFollower
from commutator.types import EngineInfo, WorkerRecord


def up(worker_id: str) -> Up:
    info = EngineInfo("fake", "1", "m", 1, 1, 1)
    return Up(WorkerRecord(worker_id, "e", "fake", "m", "127.0.0.1:1", info))


class Sink:
    """Connecting to a worker called "slow" takes for ever, to "bad" fails."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def worker_up(self, record: WorkerRecord) -> None:
        self.heard.append(f"up {record.worker_id}")
        if record.worker_id == "slow":
            await asyncio.sleep(600)
        if record.worker_id == "bad":
            raise ValueError("no")
        await asyncio.sleep(0)
        self.heard.append(f"connected {record.worker_id}")

    async def worker_down(self, worker_id: str, reason: str) -> None:
        self.heard.append(f"down {worker_id}: {reason}")


class Feed:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[Sequence[Change]] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Sequence[Change]]:
        while True:
            yield await self.queue.get()


async def test_following() -> None:
    sink, feed = Sink(), Feed()
    follower = WorkerFollower(sink)
    running = asyncio.create_task(follower.run(feed.__aiter__()))
    await asyncio.sleep(0)
    assert not follower.informed.is_set()
    feed.queue.put_nowait([up("a"), up("bad")])
    await asyncio.wait_for(follower.informed.wait(), 2)
    assert sink.heard == ["up a", "up bad", "connected a"]
    sink.heard.clear()

    feed.queue.put_nowait([up("slow")])
    feed.queue.put_nowait([Down("a", "failed"), up("a")])
    await asyncio.sleep(0.05)
    assert sink.heard == ["up slow", "down a: failed", "up a", "connected a"]

    feed.queue.put_nowait([Down("slow", "lease expired")])
    await asyncio.sleep(0.05)
    assert sink.heard[-1] == "down slow: lease expired"

    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await follower.close()


async def test_the_first_batch_may_be_empty() -> None:
    sink, feed = Sink(), Feed()
    follower = WorkerFollower(sink)
    running = asyncio.create_task(follower.run(feed.__aiter__()))
    feed.queue.put_nowait([])
    await asyncio.wait_for(follower.informed.wait(), 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
