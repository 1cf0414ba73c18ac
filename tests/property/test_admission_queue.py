"""The admission queue under any order of arrivals, ends and departures."""

from __future__ import annotations

import asyncio
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator.errors import OverloadedError
from commutator.frontend.limiter import Admission, AdmissionQueue, Limiter


class Queue(RuleBasedStateMachine):
    """Against a list of who should run and a deque of who should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = (2, 3)
        self.queue = AdmissionQueue(*self.limits)
        self.running: list[int] = []
        self.aside: list[int] = []
        self.waiting: deque[int] = deque()
        self.next = 0

    @rule()
    def arrive(self) -> None:
        ticket, self.next = self.next, self.next + 1
        admission = self.queue.arrive(ticket)
        if len(self.running) < self.limits[0]:
            assert admission is Admission.RUN
            self.running.append(ticket)
        elif len(self.waiting) < self.limits[1]:
            assert admission is Admission.WAIT
            self.waiting.append(ticket)
        else:
            assert admission is Admission.REFUSE

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def finish(self, which: int) -> None:
        self.running.pop(which % len(self.running))
        following = self.queue.finish()
        if self.waiting and len(self.running) < self.limits[0]:
            assert following == self.waiting.popleft()
            self.running.append(following)
        else:
            assert following is None

    @precondition(lambda self: self.aside)
    @rule()
    def step_back(self) -> None:
        self.running.append(self.aside.pop())
        self.queue.step_back()

    @precondition(lambda self: self.running)
    @rule()
    def step_aside(self) -> None:
        self.aside.append(self.running[0])
        self.finish(0)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 2))
    def give_up(self, which: int) -> None:
        ticket = self.waiting[which % len(self.waiting)]
        self.waiting.remove(ticket)
        assert self.queue.give_up(ticket)

    @precondition(lambda self: self.running)
    @rule()
    def give_up_too_late(self) -> None:
        assert not self.queue.give_up(self.running[0])

    @invariant()
    def agrees(self) -> None:
        assert (self.queue.running, self.queue.waiting) == (len(self.running), len(self.waiting))
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
        limiter = Limiter(*limits)
        order: list[int] = []

        async def request(number: int, ticks: int) -> None:
            waits = limiter.queue.running >= limits[0]
            async with limiter:
                if waits:  # others may begin before one whose turn has come hears of it
                    order.append(number)
                assert limiter.queue.running <= limits[0]
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
        assert (limiter.queue.running, limiter.queue.waiting) == (0, 0)

    asyncio.run(run())
