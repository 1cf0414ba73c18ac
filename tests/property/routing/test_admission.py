"""Admission over a few slots: requests come, run, are cancelled, time out; none is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.virtual_time import in_virtual_time

from commutator.contract.routing import BusyConfig
from commutator.errors import OverloadedError, RoutingError
from commutator.routing.queue import RouterQueue


@define
class Slots:
    """Stands for workers: at most ``free`` tickets at a time."""

    free: int
    max_queued: int = 100
    max_queue_s: float = 30.0
    attempts: int = 0
    waiting: int = 0
    admitted: list[int] = field(factory=list)
    admission: RouterQueue[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = BusyConfig(
            max_active_requests=1,
            max_queued_requests=self.max_queued,
            max_queue_s=self.max_queue_s,
        )
        self.admission = RouterQueue(config, lambda _: self.give_back(), self.refuse, self.count)

    def count(self, change: int) -> None:
        self.waiting += change

    def refuse(self, reason: str, words: str, retry_after_s: float) -> RoutingError:
        return OverloadedError(words, retry_after_s, reason)

    def attempt(self, number: int) -> int | None:
        self.attempts += 1
        if not self.free:
            return None
        self.free -= 1
        self.admitted.append(number)
        return number

    def give_back(self) -> None:
        self.free += 1
        self.admission.wake()

    async def request(self, number: int, priority: int = 0, ticks: int = 1) -> float:
        """Runs for some ticks of the loop; returns how long it waited."""
        place = self.admission.order.place(priority)
        now_s = asyncio.get_running_loop().time()
        result, waited_s = await self.admission.admit(
            place, now_s, lambda: self.attempt(number), again=False
        )
        assert result == number
        try:
            for _ in range(ticks):
                await asyncio.sleep(0)
        finally:
            self.give_back()
        return waited_s


requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(0, 3), st.booleans()), max_size=20
)


@given(plan=requests, slots=st.integers(1, 3), max_queued=st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_everyone_is_served_refused_or_cancelled(
    plan: list[tuple[int, int, int, bool]], slots: int, max_queued: int
) -> None:
    async def run() -> None:
        workers = Slots(slots, max_queued)
        tasks: list[asyncio.Task[float]] = []
        for number, (pause, priority, ticks, cancel) in enumerate(plan):
            for _ in range(pause):
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(workers.request(number, priority, ticks)))
            if cancel:
                tasks[number // 2].cancel()
        async with asyncio.timeout(5):  # a lost wake-up would hang here
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, float | OverloadedError | asyncio.CancelledError)
        assert workers.free == slots
        assert (workers.waiting, workers.admission.waiting) == (0, 0)

    asyncio.run(run())


@given(priorities=st.lists(st.integers(-2, 2), max_size=12))
@settings(max_examples=50, deadline=None)
def test_lower_priorities_first_and_equal_ones_in_order(priorities: list[int]) -> None:
    async def run() -> None:
        workers = Slots(0)
        tasks = []
        for number, priority in enumerate(priorities):
            tasks.append(asyncio.create_task(workers.request(number, priority)))
            await asyncio.sleep(0)
        workers.give_back()
        await asyncio.gather(*tasks)
        # Python's sort is stable, so equal priorities keep the order of arrival.
        assert workers.admitted == sorted(range(len(priorities)), key=priorities.__getitem__)

    asyncio.run(run())


@pytest.mark.parametrize(("priority", "admitted"), [(0, [0, 1]), (-1, [1, 0])])
async def test_a_request_that_comes_between_a_release_and_its_wake_up(
    priority: int, admitted: list[int]
) -> None:
    """Only a request of a higher class overtakes those that wait."""
    workers = Slots(0)
    early = asyncio.create_task(workers.request(0))
    await asyncio.sleep(0)
    workers.give_back()
    await workers.request(1, priority)
    await early
    assert workers.admitted == admitted


@in_virtual_time
async def test_waiting_costs_no_attempts() -> None:
    workers = Slots(0)
    tasks = [asyncio.create_task(workers.request(i)) for i in range(5)]
    await asyncio.sleep(0.05)
    assert workers.attempts == 1, "the first arrival's own; the others stand behind it"
    workers.give_back()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_the_time_limit() -> None:
    workers = Slots(0, max_queue_s=0.05)
    with pytest.raises(OverloadedError, match=r"none became free within 0\.05 s") as refused:
        await workers.request(0)
    assert refused.value.reason == "router_queue_timeout"
    assert workers.admission.waiting == 0


@in_virtual_time
async def test_a_full_queue_says_how_long_others_waited() -> None:
    workers = Slots(0, max_queued=1)
    first = asyncio.create_task(workers.request(0))
    await asyncio.sleep(0.03)
    with pytest.raises(OverloadedError, match="the queue of 1 is full") as refused:
        await workers.request(1)
    assert refused.value.reason == "router_queue_full"
    workers.give_back()
    waited_s = await first
    assert waited_s == pytest.approx(0.03)
    workers.free = 0
    first = asyncio.create_task(workers.request(2))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await workers.request(3)
    assert refused.value.retry_after_s == pytest.approx(waited_s)
    first.cancel()


@given(priorities=st.lists(st.integers(-2, 2), max_size=12), places=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_a_full_queue_keeps_the_most_urgent(priorities: list[int], places: int) -> None:
    """As many as there are places, of the most urgent; among equals, those who came first."""

    async def run() -> None:
        workers = Slots(0, max_queued=places)
        tasks = []
        for number, priority in enumerate(priorities):
            tasks.append(asyncio.create_task(workers.request(number, priority)))
            await asyncio.sleep(0)
            assert workers.admission.waiting == min(number + 1, places)
        workers.give_back()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert workers.admitted == sorted(range(len(tasks)), key=priorities.__getitem__)[:places]
        refused = {i for i, result in enumerate(results) if isinstance(result, OverloadedError)}
        assert refused == set(range(len(tasks))) - set(workers.admitted)
        assert workers.waiting == 0

    asyncio.run(run())


async def test_a_request_that_made_room_for_a_more_urgent_one_learns_so() -> None:
    workers = Slots(0, max_queued=1)
    batch = asyncio.create_task(workers.request(0, 5))
    await asyncio.sleep(0)
    urgent = asyncio.create_task(workers.request(1, -1))
    with pytest.raises(OverloadedError, match="of 1 is full, and more urgent") as refused:
        await batch
    assert refused.value.reason == "router_queue_displaced"
    workers.give_back()
    await urgent


async def test_cancelled_in_the_moment_of_its_turn_it_gives_the_worker_to_the_next() -> None:
    workers = Slots(0)
    tasks = [asyncio.create_task(workers.request(i)) for i in range(3)]
    await asyncio.sleep(0)
    workers.give_back()
    await asyncio.sleep(0)  # the first has its turn, but has not heard of it
    assert workers.admitted == [0]
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert workers.admitted == [0, 1, 2]
    assert workers.free == 1


async def test_an_attempt_that_fails_is_its_own_request_s_business() -> None:
    workers = Slots(0)

    def broken() -> int | None:
        if workers.free:
            raise RoutingError("the policy picked no worker")
        return None

    now_s = asyncio.get_running_loop().time()
    failing = asyncio.create_task(
        workers.admission.admit(workers.admission.order.place(0), now_s, broken, again=False)
    )
    await asyncio.sleep(0)
    behind = asyncio.create_task(workers.request(1))
    await asyncio.sleep(0)
    workers.give_back()
    with pytest.raises(RoutingError, match="picked no worker"):
        await failing
    await behind


async def test_many_leave_at_once() -> None:
    """Ten thousand wait, a random half goes; the rest is served."""
    workers = Slots(0, max_queued=10_000)
    tasks = [asyncio.create_task(workers.request(i, i % 3)) for i in range(10_000)]
    await asyncio.sleep(0)
    chance = random.Random(1)
    gone = {i for i in range(10_000) if chance.random() < 0.5}
    for i in gone:
        tasks[i].cancel()
    workers.give_back()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(workers.admitted) == set(range(10_000)) - gone
