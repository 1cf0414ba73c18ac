"""A ``RouterQueue``: who tries for a worker on arrival, and how long the oldest has waited."""

from __future__ import annotations

import asyncio
import contextlib

from commutator.contract.routing import BusyConfig
from commutator.errors import OverloadedError
from commutator.fairness import Weighted
from commutator.routing.queue import Place, RouterQueue


class Requests:
    """Requests at one queue, whose worker is busy until ``free`` is set."""

    def __init__(self) -> None:
        self.free = False
        self.attempts = 0
        self.policy = Weighted()
        self.queue = RouterQueue[str](
            BusyConfig(max_active_requests=1),
            undo=lambda _: None,
            refusal=lambda reason, problem, after_s: OverloadedError(problem, after_s, reason),
            fairness=self.policy,
            prompt_tokens=lambda _: 100,
        )

    async def waits(
        self, place: Place, waited_s: float, *, again: bool = False
    ) -> asyncio.Task[tuple[str, float]]:
        """A request that arrived ``waited_s`` ago and waits now."""
        arrived_s = asyncio.get_running_loop().time() - waited_s
        admitted = self.queue.admit(place, arrived_s, self._attempt, again=again)
        task = asyncio.create_task(admitted)
        await asyncio.sleep(0)
        return task

    def _attempt(self) -> str | None:
        self.attempts += 1
        return "worker" if self.free else None


async def cancel(task: asyncio.Task[tuple[str, float]]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_who_comes_while_others_wait_tries_no_worker_and_overtakes_nobody() -> None:
    requests = Requests()
    queue = requests.queue
    first = await requests.waits(queue.order.place(0, "flood"), 0.0)
    assert requests.attempts == 1
    requests.free = True
    urgent = await requests.waits(queue.order.place(-1, "other"), 0.0)
    assert requests.attempts == 1, "where a request waits, every worker is busy"
    queue.wake()
    late = await requests.waits(queue.order.place(0, "third"), 0.0)
    assert [await task for task in (first, urgent, late)]


async def test_who_need_not_wait_gets_no_credit_for_the_time_before() -> None:
    requests = Requests()
    queue, requests.free = requests.queue, True
    for name in ["idle", *["busy"] * 50, "idle"]:
        await (await requests.waits(queue.order.place(0, name), 0.0))
    assert requests.policy.rank("idle") == requests.policy.rank("busy")


async def test_the_age_is_that_of_the_earliest_arrival_whatever_its_place() -> None:
    requests = Requests()
    queue = requests.queue
    assert queue.oldest_s == 0.0
    late_place, early_place = queue.order.place(5), queue.order.place(0)
    first = await requests.waits(early_place, 1.0)
    assert 1.0 <= queue.oldest_s < 2.0
    # Admitted before, but its worker was dead: it enters after the first, and arrived before it.
    second = await requests.waits(late_place, 3.0, again=True)
    third = await requests.waits(queue.order.place(-1), 0.0)
    assert 3.0 <= queue.oldest_s < 4.0
    await cancel(second)
    assert 1.0 <= queue.oldest_s < 2.0
    await cancel(first)
    assert queue.oldest_s < 1.0
    requests.free = True
    queue.wake()
    await third
    assert queue.oldest_s == 0.0
    assert queue.waiting == 0


async def test_requests_that_arrived_at_the_same_time_leave_one_by_one() -> None:
    requests = Requests()
    queue, now_s = requests.queue, asyncio.get_running_loop().time()
    tasks = [
        asyncio.create_task(
            queue.admit(queue.order.place(0), now_s - 2.0, lambda: None, again=False)
        )
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    for task in tasks:
        assert 2.0 <= queue.oldest_s < 3.0
        await cancel(task)
    assert queue.oldest_s == 0.0
