"""Requests that wait for a prefill worker: bounded, in order, and gone at once when cancelled."""

from __future__ import annotations

import asyncio

import pytest
from attrs import evolve
from tests.support.virtual_time import in_virtual_time
from tests.unit.routing.apart_world import INFO, World

from commutator.contract.routing import BusyConfig
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import OverloadedError, RoutingError

ONE = BusyConfig(max_active_requests=1)


async def until_waiting(world: World, count: int) -> None:
    async with asyncio.timeout(30):
        while world.dispatcher.prefill_queues()["m"].requests != count:
            await asyncio.sleep(0)


@in_virtual_time
async def test_one_more_waits_and_then_has_its_turn() -> None:
    world = World(busy=ONE)
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0")
    first = asyncio.create_task(world.begin_and_read())
    while not prefill.open:
        await asyncio.sleep(0)
    second = asyncio.create_task(world.begin_and_read())
    await until_waiting(world, 1)
    await asyncio.sleep(0.01)
    assert world.dispatcher.prefill_queues()["m"].oldest_s == pytest.approx(0.01)
    third = await world.begin()
    assert world.policy.questions[-1].queued_prefills == 1
    assert world.policy.questions[-1].queue_age_s == pytest.approx(0.01)
    await third.aclose()
    assert prefill.holds is not None
    prefill.holds.set()
    await asyncio.gather(first, second)
    assert ("queued", "prefill", True) in world.told
    assert len(prefill.asked) == 2
    world.check_closed()
    assert world.dispatcher.prefill_queues()["m"].requests == 0


async def test_a_full_queue_is_not_joined() -> None:
    world = World(busy=evolve(ONE, max_queued_requests=0))
    prefill = await world.up("p-0", holds=asyncio.Event())
    decode = await world.up("d-0")
    first = asyncio.create_task(world.begin_and_read())
    while not prefill.open:
        await asyncio.sleep(0)
    second = await world.begin_and_read()
    assert second.explain()["disaggregation"]["outcome"].endswith("the queue of 0 is full")
    assert decode.asked[-1].handover is None
    assert ("refused", None) in world.sides()
    assert prefill.holds is not None
    prefill.holds.set()
    await first
    world.check_closed()


async def test_a_decode_worker_that_computes_no_prompts_fails_with_the_prefill_pools_reason() -> (
    None
):
    world = World(busy=evolve(ONE, max_queued_requests=0), on_failure="another_worker")
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0", alone=False)
    first = asyncio.create_task(world.begin_and_read())
    while not prefill.open:
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="the queue of 0 is full"):
        await world.begin_and_read()
    assert prefill.holds is not None
    prefill.holds.set()
    await first
    prefill.troubles.append(RuntimeError("out of memory"))
    with pytest.raises(RoutingError, match="no prefill worker is ready"):
        await world.begin_and_read()
    world.check_closed()


async def test_a_request_that_waits_too_long_is_prefilled_locally() -> None:
    world = World(busy=evolve(ONE, max_queue_s=0.01))
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0")
    first = asyncio.create_task(world.begin_and_read())
    while not prefill.open:
        await asyncio.sleep(0)
    second = await world.begin_and_read()
    outcome = second.explain()["disaggregation"]["outcome"]
    assert outcome.endswith("none became free within 0.01 s")
    assert prefill.holds is not None
    prefill.holds.set()
    await first
    world.check_closed()


async def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    world = World(busy=ONE)
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0")
    first = asyncio.create_task(world.begin_and_read())
    while not prefill.open:
        await asyncio.sleep(0)
    second = asyncio.create_task(world.begin_and_read())
    await until_waiting(world, 1)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert world.dispatcher.prefill_queues()["m"].requests == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.check_closed()


async def test_a_role_changes_which_pool_a_worker_is_in() -> None:
    world = World()
    one, other = await world.up("b-0"), await world.up("b-1")
    assert (await world.run())[1] == {}
    one.asked.clear()
    other.asked.clear()
    record = WorkerRecord(
        worker_id="b-0",
        engine="e",
        kind="fake",
        model="m",
        address="b-0",
        info=INFO,
        role=Role.PREFILL,
    )
    await world.dispatcher.membership.worker_up(record)
    roles = {status.worker_id: status.role for status in world.dispatcher.status()}
    assert roles == {"b-0": Role.PREFILL, "b-1": Role.BOTH}
    assert (await world.run())[1]["outcome"] == "handed over"
    assert (len(one.asked), len(other.asked)) == (1, 1)
    await world.dispatcher.membership.worker_up(evolve(record, role=Role.DECODE))
    await world.run()
    assert (await world.run())[1] == {}
    assert (len(one.asked), len(other.asked)) == (2, 2)


async def test_a_drained_prefill_worker_gets_nothing_new() -> None:
    world = World()
    prefill = await world.up("p-0")
    await world.up("d-0")
    record = WorkerRecord(
        worker_id="p-0",
        engine="e",
        kind="fake",
        model="m",
        address="p-0",
        info=INFO,
        role=Role.PREFILL,
    )
    await world.dispatcher.membership.worker_up(evolve(record, draining=True))
    assert (await world.run())[1] == {}
    assert not prefill.asked


async def test_the_prefill_pool_has_a_policy_of_its_own() -> None:
    """Round robin among decode workers, the least loaded among prefill workers."""
    world = World(router="least_loaded")
    held = asyncio.Event()
    busy = await world.up("p-0", holds=held)
    await world.up("d-0")
    first = asyncio.create_task(world.begin_and_read())
    while not busy.open:
        await asyncio.sleep(0)
    idle = await world.up("p-1")
    for _ in range(3):
        assert (await world.begin_and_read()).explain()["disaggregation"][
            "prefill_worker_id"
        ] == "p-1"
    assert len(idle.asked) == 3
    held.set()
    await first
    world.check_closed()
