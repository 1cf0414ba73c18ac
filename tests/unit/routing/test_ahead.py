"""While a request waits for a worker, the likely one is asked to bring its blocks up."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.routing.test_dispatcher import FakeClient, Setup, request

from commutator.contract.block import BlockStored
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import KvPrompt
from commutator.errors import EngineWithoutTiersError, OverloadedError
from commutator.routing.dispatch import Dispatch
from commutator.routing.queue import RouterQueue

TOKENS = tuple(request("any").token_ids)
BLOCK_SIZE = 16


class Worker(FakeClient):
    """Writes down what it is asked."""

    def __init__(self, address: str, *, keeps_tiers: bool = True) -> None:
        super().__init__(address)
        self.asked: list[KvPrompt] = []
        self.keeps_tiers = keeps_tiers

    async def kv_prefetch(self, prompt: KvPrompt, *, timeout_s: float = 5.0) -> None:
        self.asked.append(prompt)
        if not self.keeps_tiers:
            raise EngineWithoutTiersError


class Fleet:
    """Workers that take one request each, behind the policy `kv`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: Worker) -> None:
        self.setup = Setup(router="kv", busy=BusyConfig(max_active_requests=1))
        self.workers = {worker.address: worker for worker in workers}
        monkeypatch.setattr(
            self.setup.connector, "connect", lambda _, address: self.workers[address]
        )

    async def up(self) -> None:
        await self.setup.up(*self.workers)

    def stored(self, worker_id: str, medium: str) -> None:
        cache = self.setup.dispatcher.indexers().get("m/0")
        assert cache is not None
        event = BlockStored(
            block_hashes=(7,),
            parent_block_hash=None,
            token_ids=TOKENS[:BLOCK_SIZE],
            block_size=BLOCK_SIZE,
            medium=medium,
        )
        cache.index.apply(worker_id, event)

    async def begun(self, name: str) -> Dispatch:
        return await self.setup.dispatcher.dispatch("m", request(name))

    async def waits(self, name: str) -> asyncio.Task[Dispatch]:
        """A request that is waiting now, and of which the workers have been told."""
        before = self.setup.dispatcher.waiting("m")
        task = asyncio.create_task(self.begun(name))
        async with asyncio.timeout(30):
            while self.setup.dispatcher.waiting("m") == before:
                await asyncio.sleep(0)
        for _ in range(10):  # what was begun then comes to its first question
            await asyncio.sleep(0)
        return task

    async def served(self, dispatch: Dispatch) -> None:
        async for _ in dispatch:
            pass
        await dispatch.aclose()


@pytest.mark.parametrize("medium", ["CPU", "DISK", "EXTERNAL"])
async def test_the_worker_that_has_the_blocks_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, medium: str
) -> None:
    first, second = Worker("w-0"), Worker("w-1")
    fleet = Fleet(monkeypatch, first, second)
    await fleet.up()
    running = [await fleet.begun("a"), await fleet.begun("b")]
    assert not first.asked
    assert not second.asked, "a request that does not wait needs no prefetch"
    cache = fleet.setup.dispatcher.indexers().get("m/0")
    assert cache is not None
    for name in fleet.workers:
        cache.index.reset_worker(name)  # what was guessed
    fleet.stored("w-1", medium)
    waiting = await fleet.waits("c")
    assert second.asked == [KvPrompt(token_ids=list(TOKENS))]
    assert not first.asked
    for dispatch in running:
        await fleet.served(dispatch)
    await fleet.served(await waiting)
    assert len(second.asked) == 1
    await fleet.setup.dispatcher.close()


@pytest.mark.parametrize("medium", ["GPU", None])
async def test_no_worker_is_asked_for_blocks_that_are_on_the_device_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, medium: str | None
) -> None:
    worker = Worker("w-0")
    fleet = Fleet(monkeypatch, worker)
    await fleet.up()
    running = await fleet.begun("a")
    cache = fleet.setup.dispatcher.indexers().get("m/0")
    assert cache is not None
    cache.index.reset_worker("w-0")
    if medium is not None:
        fleet.stored("w-0", medium)
    waiting = await fleet.waits("b")
    assert not worker.asked
    await fleet.served(running)
    await fleet.served(await waiting)
    await fleet.setup.dispatcher.close()


async def test_a_worker_that_cannot_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("w-0", keeps_tiers=False)
    fleet = Fleet(monkeypatch, worker)
    await fleet.up()
    fleet.stored("w-0", "CPU")
    running = await fleet.begun("a")
    cache = fleet.setup.dispatcher.indexers().get("m/0")
    assert cache is not None
    cache.index.reset_worker("w-0")
    fleet.stored("w-0", "CPU")
    waiting = await fleet.waits("b")
    assert len(worker.asked) == 1
    await fleet.served(running)
    await fleet.served(await waiting)
    await fleet.setup.dispatcher.close()


async def test_only_those_whose_turn_comes_soon_are_looked_ahead_for() -> None:
    """32 of them, each once; when eight have gone, those behind them come near."""
    free: list[str] = []
    near: list[int] = []

    def attempt() -> str | None:
        return free.pop() if free else None

    def refused(reason: str, words: str, retry_after_s: float) -> OverloadedError:
        return OverloadedError(words, retry_after_s, reason)

    config = BusyConfig(max_active_requests=1, max_queued_requests=100, max_queue_s=1000)
    admission: RouterQueue[str] = RouterQueue(config, free.append, refused)
    now_s = asyncio.get_running_loop().time()

    async def admitted(number: int) -> None:
        place = admission.order.place(0)
        await admission.admit(
            place, now_s, attempt, again=False, on_near=lambda: near.append(number)
        )

    tasks = [asyncio.create_task(admitted(number)) for number in range(60)]
    async with asyncio.timeout(30):
        while admission.waiting < 60:
            await asyncio.sleep(0)
        for gone, looked_ahead_for in ((0, 32), (7, 32), (8, 40), (15, 40), (16, 48)):
            free += ["x"] * (gone - (60 - admission.waiting))
            admission.wake()
            while admission.waiting > 60 - gone:
                await asyncio.sleep(0)
            assert near == list(range(looked_ahead_for))
        free += ["x"] * 44
        admission.wake()
        await asyncio.gather(*tasks)
    assert near == list(range(48)), "the others did not have to wait any more"
