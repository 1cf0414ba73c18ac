"""The concurrency limiter under any order of arrivals, ends and departures."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator.contract.request import UNKNOWN_CALLER, Caller
from commutator.errors import OverloadedError
from commutator.frontend.limits import ConcurrencyLimiter


class Queue(RuleBasedStateMachine):
    """Against a list of who should run and a deque of who should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = (2, 3)
        self.loop = asyncio.new_event_loop()
        self.limiter = ConcurrencyLimiter(*self.limits)
        self.holds: dict[asyncio.Task[None], AbstractAsyncContextManager[None]] = {}
        self.running: list[asyncio.Task[None]] = []
        self.aside: list[asyncio.Task[None]] = []
        self.waiting: deque[asyncio.Task[None]] = deque()

    def teardown(self) -> None:
        for task in self.waiting:
            task.cancel()
        self.settle()
        self.loop.close()

    def settle(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def leave(self, task: asyncio.Task[None]) -> None:
        self.loop.run_until_complete(self.holds.pop(task).__aexit__(None, None, None))

    def next_runs(self) -> None:
        if self.waiting and len(self.running) < self.limits[0]:
            self.running.append(self.waiting.popleft())

    @rule()
    def arrive(self) -> None:
        hold = self.limiter.of(UNKNOWN_CALLER)
        task = self.loop.create_task(hold.__aenter__())
        self.holds[task] = hold
        self.settle()
        if len(self.running) < self.limits[0]:
            self.running.append(task)
        elif len(self.waiting) < self.limits[1]:
            self.waiting.append(task)
        else:
            with pytest.raises(OverloadedError):
                task.result()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def finish(self, which: int) -> None:
        self.leave(self.running.pop(which % len(self.running)))
        self.next_runs()

    @precondition(lambda self: self.aside)
    @rule()
    def step_back(self) -> None:
        self.running.append(self.aside.pop())
        self.limiter.stepped(-1)

    @precondition(lambda self: self.running)
    @rule()
    def step_aside(self) -> None:
        self.aside.append(self.running.pop(0))
        self.limiter.stepped(1)
        self.next_runs()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 2))
    def give_up(self, which: int) -> None:
        task = self.waiting[which % len(self.waiting)]
        self.waiting.remove(task)
        task.cancel()

    @precondition(lambda self: self.running and self.waiting)
    @rule()
    def give_up_as_the_turn_comes(self) -> None:
        """The place goes to the one that arrived next."""
        over = self.running.pop(0)
        task = self.waiting[0]
        self.loop.call_soon(task.cancel)
        self.leave(over)
        self.next_runs()
        self.settle()
        if task in self.running:
            self.running.remove(task)
            with suppress(asyncio.CancelledError):
                task.result()
            self.next_runs()
        else:
            self.waiting.remove(task)

    @invariant()
    def agrees(self) -> None:
        self.settle()
        now = (self.limiter.running, self.limiter.waiting)
        assert now == (len(self.running), len(self.waiting))
        assert all(task.done() for task in self.running)
        assert not any(task.done() for task in self.waiting)
        assert not self.waiting or len(self.running) >= self.limits[0]


TestQueue = Queue.TestCase


@given(
    plan=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=14),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 4)),
)
@settings(max_examples=50, deadline=None)
def test_no_place_is_lost(plan: list[tuple[int, int, bool]], limits: tuple[int, int]) -> None:
    """Requests come, take their time, and some are cancelled, perhaps just as their turn comes."""

    async def run() -> None:
        limiter = ConcurrencyLimiter(*limits)
        order: list[int] = []

        async def request(number: int, ticks: int) -> None:
            waits = limiter.running >= limits[0]
            async with limiter.of(UNKNOWN_CALLER):
                if waits:  # others may begin before one whose turn has come hears of it
                    order.append(number)
                assert limiter.running <= limits[0]
                for _ in range(ticks):
                    await asyncio.sleep(0)

        tasks = []
        for number, (pause, ticks, cancelled) in enumerate(plan):
            for _ in range(pause):
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(request(number, ticks)))
            if cancelled and number:
                tasks[number // 2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, OverloadedError | asyncio.CancelledError)
        assert order == sorted(order), "someone overtook"
        assert (limiter.running, limiter.waiting) == (0, 0)

    asyncio.run(run())


async def arrive(limiter: ConcurrencyLimiter, caller: Caller) -> Held:
    """A request that waits, or holds a place until its ``over`` is set."""
    over = asyncio.Event()

    async def hold() -> None:
        async with limiter.of(caller):
            await over.wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    return task, over


Held = tuple[asyncio.Task[None], asyncio.Event]


@pytest.mark.security
async def test_a_flood_by_one_principal_keeps_nobody_out() -> None:
    """It fills the queue; others still get in, and each place that becomes free."""
    limiter = ConcurrencyLimiter(2, 4)
    flood, other = Caller(principal="flood"), Caller(principal="other")
    floods = [await arrive(limiter, flood) for _ in range(7)]
    with pytest.raises(OverloadedError, match="2 requests run and 4 wait: the queue is full"):
        await floods[6][0]
    late = await arrive(limiter, other)
    with pytest.raises(OverloadedError, match="others have fewer in it"):
        await floods[5][0]
    limiter.check(other)
    with pytest.raises(OverloadedError):
        limiter.check(flood)
    floods[0][1].set()
    await floods[0][0]
    await asyncio.sleep(0)
    assert (limiter.running, limiter.waiting) == (2, 3)
    late[1].set()
    await late[0]  # it held the place, though three had waited longer
    for task, over in floods[1:5]:
        over.set()
        await task
    assert (limiter.running, limiter.waiting) == (0, 0)


@given(arrivals=st.lists(st.sampled_from(["a", "b", "c"]), max_size=30))
@settings(max_examples=50, deadline=None)
def test_a_full_queue_is_shared(arrivals: list[str]) -> None:
    """Nobody has more than one request more in it than somebody who was refused."""

    async def run() -> None:
        limiter = ConcurrencyLimiter(3, 5)
        held = [(name, await arrive(limiter, Caller(principal=name))) for name in arrivals]
        await asyncio.sleep(0)  # who was refused for another resumes
        await asyncio.sleep(0)
        waiting = [name for name, (task, _) in held if not task.done()][3:]
        assert len(waiting) == limiter.waiting == max(0, min(5, len(arrivals) - 3))
        refused = {name for name, (task, _) in held if task.done()}
        for name in refused:
            most = max(waiting.count(other) for other in waiting)
            assert most <= waiting.count(name) + 1
        for _, (task, over) in held:
            over.set()
            with suppress(OverloadedError):
                await task
        assert (limiter.running, limiter.waiting) == (0, 0)

    asyncio.run(run())
