"""The dispatcher with busy thresholds: which requests wait, for which worker, what is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from attrs import evolve
from tests.support.virtual_time import in_virtual_time
from tests.unit.routing.test_dispatcher import FakeClient, Setup, request

from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.contract.routing import BusyConfig, WorkerLoad
from commutator.contract.worker import EngineInfo
from commutator.errors import OverloadedError, RoutingError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed
from commutator.routing.dispatch import Dispatch
from commutator.routing.placement import Placement


def setup_with(**busy: Any) -> Setup:
    return Setup(busy=BusyConfig(**busy))


async def begun(setup: Setup, name: str, priority: int = 0, **options: Any) -> Dispatch:
    return await setup.dispatcher.dispatch("m", request(name, 50, priority), **options)


async def until_waiting(setup: Setup, count: int) -> None:
    async with asyncio.timeout(3):
        while setup.dispatcher.waiting("m") != count:
            await asyncio.sleep(0)


async def test_busy_workers_are_left_out_and_explained() -> None:
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0", "w-1")
    first, second = await begun(setup, "a"), await begun(setup, "b")
    assert [first.worker_id, second.worker_id] == ["w-0", "w-1"]
    explained = second.explain()
    assert {c["worker_id"]: c["busy"] for c in explained["candidates"]} == {
        "w-0": "max_active_requests",
        "w-1": None,
    }
    assert explained["waited_s"] == 0
    await first.aclose()
    await second.aclose()


async def test_a_request_waits_until_a_worker_has_finished_another() -> None:
    heard: list[int] = []
    setup = Setup(busy=BusyConfig(max_active_requests=1), on_waiting=heard.append)
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = asyncio.create_task(begun(setup, "b"))
    await until_waiting(setup, 1)
    async for _ in first:
        assert not second.done()
    dispatch = await second
    assert heard == [1, -1]
    assert dispatch.route.waited_s > 0
    assert dispatch.explain()["waited_s"] > 0
    assert setup.watcher.seen.count("routed") == 2
    await dispatch.aclose()
    assert setup.active() == 0


async def test_the_first_token_frees_prefill() -> None:
    setup = setup_with(active_prefill_tokens_threshold=0)
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = asyncio.create_task(begun(setup, "b"))
    await until_waiting(setup, 1)
    await anext(first)
    dispatch = await second
    assert setup.active() == 2
    await first.aclose()
    await dispatch.aclose()


async def test_blocks_of_long_answers_make_a_worker_busy() -> None:
    setup = setup_with(active_decode_blocks_threshold=0.04)  # of 64 blocks: more than 2
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = await begun(setup, "b")  # 2 blocks are held
    third = asyncio.create_task(begun(setup, "c"))
    await until_waiting(setup, 1)
    await second.aclose()
    dispatch = await third
    await first.aclose()
    await dispatch.aclose()


async def test_a_worker_that_comes_up_takes_a_waiting_request() -> None:
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = asyncio.create_task(begun(setup, "b"))
    await until_waiting(setup, 1)
    await setup.up("w-1")
    dispatch = await second
    assert dispatch.worker_id == "w-1"
    await first.aclose()
    await dispatch.aclose()


async def test_who_may_go_only_to_some_workers_gets_a_free_one_while_others_wait_for_theirs() -> (
    None
):
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0", "w-1")
    placer = setup.dispatcher._models["m"].placer

    async def placed(name: str, priority: int, worker_id: str) -> Placement:
        about = RequestSummary(
            request_id=name, model="m", prompt_tokens=1, max_tokens=1, priority=priority
        )
        return await placer.place(
            about, (), may_wait=True, usable=lambda worker: worker.record.worker_id == worker_id
        )

    first = await placed("a", 0, "w-0")
    waiting = asyncio.create_task(placed("b", 0, "w-0"))
    await until_waiting(setup, 1)
    urgent = await asyncio.wait_for(placed("c", -1, "w-1"), 3)
    assert not waiting.done()
    for placement in (first, urgent):
        placer.load.release(placement.ticket)
    placer.load.release((await waiting).ticket)


async def test_urgent_requests_go_first() -> None:
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0")
    order: list[str] = []
    first = await begun(setup, "a")

    async def one(name: str, priority: int) -> None:
        dispatch = await begun(setup, name, priority)
        order.append(name)
        await dispatch.aclose()

    tasks = []
    for name, priority in [("b", 0), ("c", 1), ("d", -1), ("e", 0)]:
        tasks.append(asyncio.create_task(one(name, priority)))
        await until_waiting(setup, len(tasks))
    await first.aclose()
    await asyncio.gather(*tasks)
    assert order == ["d", "b", "e", "c"]


async def test_refusals_name_the_threshold() -> None:
    setup = setup_with(max_active_requests=1, max_queued_requests=1, max_queue_s=0.1)
    await setup.up("w-0", "w-1")
    running = [await begun(setup, "a"), await begun(setup, "b")]
    waiting = asyncio.create_task(begun(setup, "c"))
    await until_waiting(setup, 1)
    busy = r"2 workers are busy \(2 by max_active_requests=1\); "
    with pytest.raises(OverloadedError, match=busy + "the queue of 1 is full"):
        await begun(setup, "d")
    with pytest.raises(OverloadedError, match=busy + r"none became free within 0\.1 s"):
        await waiting
    assert setup.watcher.seen.count("failed") == 2
    for dispatch in running:
        await dispatch.aclose()


async def test_a_later_answer_of_a_request_does_not_wait() -> None:
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0")
    first = await begun(setup, "a-0")
    second = await begun(setup, "a-1", may_wait=False)
    assert setup.active() == 2
    await first.aclose()
    await second.aclose()


async def test_a_client_that_leaves_while_it_waits() -> None:
    setup = setup_with(max_active_requests=1)
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = asyncio.create_task(begun(setup, "b"))
    await until_waiting(setup, 1)
    second.cancel()
    await until_waiting(setup, 0)
    assert isinstance(setup.watcher.failures[0], asyncio.CancelledError)
    await first.aclose()
    assert setup.active() == 0


@in_virtual_time
async def test_a_worker_found_dead_after_waiting_costs_no_place() -> None:
    """Its request waits again, before later ones, and goes to the next free worker."""
    setup = setup_with(max_active_requests=1, max_queued_requests=2)
    await setup.up("w-0", "w-1")
    running = [await begun(setup, "a"), await begun(setup, "b")]
    waiting = [asyncio.create_task(begun(setup, name)) for name in "cd"]
    await until_waiting(setup, 2)
    setup.connector.clients["w-0"].reachable = False
    await running[0].aclose()
    await asyncio.sleep(0.01)
    assert setup.dispatcher.waiting("m") == 2
    await running[1].aclose()
    first = await waiting[0]
    assert first.worker_id == "w-1"
    assert not waiting[1].done()
    await first.aclose()
    await (await waiting[1]).aclose()
    assert setup.active() == 0
    await setup.dispatcher.close()


async def test_a_waiting_request_outlives_a_short_absence_of_every_worker() -> None:
    setup = setup_with(max_active_requests=1, max_queue_s=0.3)
    await setup.up("w-0")
    first = await begun(setup, "a")
    waiting = [asyncio.create_task(begun(setup, "b"))]
    await until_waiting(setup, 1)
    await setup.dispatcher.membership.worker_down("w-0", "failed")
    with pytest.raises(RoutingError, match="no worker is ready"):
        await begun(setup, "c")
    await first.aclose()
    await setup.up("w-1")
    dispatch = await waiting[0]
    assert dispatch.worker_id == "w-1"
    waiting = [asyncio.create_task(begun(setup, "d"))]
    await until_waiting(setup, 1)
    await setup.dispatcher.membership.worker_down("w-1", "failed")
    with pytest.raises(RoutingError, match="no worker is ready") as refused:
        await waiting[0]
    assert not isinstance(refused.value, OverloadedError)
    await dispatch.aclose()


def told(setup: Setup, name: str, **facts: Any) -> None:
    """The worker says so of itself, other than the rest."""

    class Telling(FakeClient):
        async def start(self) -> EngineInfo:
            return evolve(await super().start(), **facts)

    setup.connector.clients[name] = Telling(name)


@pytest.mark.parametrize("block_size", [1, 16, 64])
async def test_loads_are_counted_in_the_routers_blocks_whatever_the_workers(
    block_size: int,
) -> None:
    setup = setup_with(active_decode_blocks_threshold=0.04)  # of 1,024 tokens: more than 2 blocks
    told(setup, "w-0", block_size=block_size, kv_capacity_blocks=1024 // block_size)
    await setup.up("w-0")
    running = [await begun(setup, "a")]
    assert setup.dispatcher.load.of("w-0").active_decode_blocks == 2
    running.append(await begun(setup, "b"))
    third = asyncio.create_task(begun(setup, "c"))
    await until_waiting(setup, 1)
    await running[0].aclose()
    await (await third).aclose()
    await running[1].aclose()


async def test_a_rank_is_full_when_its_own_part_of_the_memory_is() -> None:
    setup = setup_with(active_decode_blocks_threshold=0.05)  # of 32 blocks each: more than 1
    told(setup, "w-0", data_parallel_size=2)
    await setup.up("w-0")
    running = [await begun(setup, "a"), await begun(setup, "b")]
    third = asyncio.create_task(begun(setup, "c"))
    await until_waiting(setup, 1)
    await running[0].aclose()
    await (await third).aclose()
    await running[1].aclose()


async def test_each_rank_of_a_worker_is_busy_by_itself() -> None:
    setup = setup_with(max_active_requests=1)
    told(setup, "w-0", data_parallel_size=2)
    await setup.up("w-0")
    running = [await begun(setup, "a"), await begun(setup, "b")]
    assert {dispatch.route.decision.worker_id for dispatch in running} == {"w-0@0", "w-0@1"}
    third = asyncio.create_task(begun(setup, "c"))
    await until_waiting(setup, 1)
    await running[1].aclose()
    dispatch = await third
    assert dispatch.route.decision.worker_id == running[1].route.decision.worker_id
    await running[0].aclose()
    await dispatch.aclose()


@in_virtual_time
async def test_waiting_counts_towards_the_first_token() -> None:
    class Times:
        ttft_s = 0.0
        duration_s = 0.0

        @hookimpl
        def request_first_token(self, ttft_s: float) -> None:
            self.ttft_s = ttft_s

        @hookimpl
        def request_finished(self, outcome: RequestOutcome) -> None:
            self.duration_s = outcome.duration_s

    setup, times = setup_with(max_active_requests=1), Times()
    setup.host.add(times, Installed("times", "dist-times", "1"))
    await setup.up("w-0")
    first = await begun(setup, "a")
    second = asyncio.create_task(setup.run("b"))
    await until_waiting(setup, 1)
    await asyncio.sleep(0.1)
    await first.aclose()
    await second
    assert 0.1 <= times.ttft_s <= times.duration_s < 5


async def test_load_that_falls_elsewhere_lets_a_request_through() -> None:
    setup = setup_with(max_active_requests=2)
    await setup.up("w-0")
    load = setup.dispatcher.load
    load.set_peers({"w-0": WorkerLoad(active_requests=2)}, 1)
    waiting = asyncio.create_task(begun(setup, "a"))
    await until_waiting(setup, 1)
    load.set_peers({"w-0": WorkerLoad(active_requests=1)}, 1)
    dispatch = await waiting
    (status,) = setup.dispatcher.status()
    assert (status.active_requests, status.active_requests_of_all) == (1, 2)
    await dispatch.aclose()


async def test_where_workers_are_started_on_demand_a_request_waits_for_the_first() -> None:
    setup = Setup(from_zero=True)
    assert setup.dispatcher.ready(), "requests are welcome without a worker"
    first = asyncio.create_task(begun(setup, "a"))
    second = asyncio.create_task(begun(setup, "b"))
    await until_waiting(setup, 2)
    await setup.up("w-0")
    for asked in (first, second):
        dispatch = await asked
        assert dispatch.worker_id == "w-0"
        assert dispatch.route.waited_s > 0
        await dispatch.aclose()
    assert setup.active() == 0
    with pytest.raises(RoutingError, match="no worker is ready"):
        await begun(Setup(), "a")
