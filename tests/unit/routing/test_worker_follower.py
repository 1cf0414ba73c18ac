"""Changes reach the dispatcher in order for each worker, and no worker waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from tests.support.virtual_time import in_virtual_time

from commutator.contract.registry import Change, WorkerDown, WorkerUp
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.routing.membership import WorkerFollower


def up(worker_id: str) -> WorkerUp:
    info = EngineInfo(
        kind="fake", version="1", model="m", max_model_len=1, block_size=1, kv_capacity_blocks=1
    )
    return WorkerUp(
        record=WorkerRecord(
            worker_id=worker_id,
            engine="e",
            kind="fake",
            model="m",
            address="127.0.0.1:1",
            info=info,
        )
    )


class Sink:
    """Connecting to a worker called "slow" takes for ever, to "bad" fails.

    So it does as often as ``refused`` says of a worker.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.refused: dict[str, int] = {}

    async def worker_up(self, record: WorkerRecord) -> None:
        self.heard.append(f"up {record.worker_id}")
        if record.worker_id == "slow":
            await asyncio.sleep(600)
        self.refused[record.worker_id] = self.refused.get(record.worker_id, 0) - 1
        if record.worker_id == "bad" or self.refused[record.worker_id] >= 0:
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


@in_virtual_time
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
    feed.queue.put_nowait([WorkerDown(worker_id="a", reason="failed"), up("a")])
    await asyncio.sleep(0.05)
    assert sink.heard == ["up slow", "down a: failed", "up a", "connected a"]

    feed.queue.put_nowait([WorkerDown(worker_id="slow", reason="lease expired")])
    await asyncio.sleep(0.05)
    assert sink.heard[-1] == "down slow: lease expired"

    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await follower.close()


@in_virtual_time
async def test_the_first_batch_may_be_empty() -> None:
    sink, feed = Sink(), Feed()
    follower = WorkerFollower(sink)
    running = asyncio.create_task(follower.run(feed.__aiter__()))
    feed.queue.put_nowait([])
    await asyncio.wait_for(follower.informed.wait(), 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def seen(sink: Sink, line: str) -> None:
    async with asyncio.timeout(30):
        while line not in sink.heard:
            await asyncio.sleep(0.001)


@in_virtual_time
async def test_a_worker_that_cannot_be_taken_in_is_tried_again_until_it_can() -> None:
    sink, feed = Sink(), Feed()
    sink.refused["later"] = 3
    follower = WorkerFollower(sink, retry_s=0.001)
    running = asyncio.create_task(follower.run(feed.__aiter__()))
    feed.queue.put_nowait([up("later"), up("a")])
    await asyncio.wait_for(follower.informed.wait(), 30)
    await seen(sink, "connected later")
    assert sink.heard.count("up later") == 4
    running.cancel()
    await follower.close()


@in_virtual_time
async def test_nothing_is_tried_again_after_something_newer() -> None:
    sink, feed = Sink(), Feed()
    follower = WorkerFollower(sink, retry_s=0.001)
    running = asyncio.create_task(follower.run(feed.__aiter__()))
    feed.queue.put_nowait([up("bad")])
    await seen(sink, "up bad")
    feed.queue.put_nowait([WorkerDown(worker_id="bad", reason="gone")])
    await seen(sink, "down bad: gone")
    sink.heard.clear()
    await asyncio.sleep(0.05)
    assert sink.heard == []
    running.cancel()
    await follower.close()
