"""The queue of one model's requests that wait because every worker is busy.

``RequestQueue`` holds the order of the queue; it does no I/O, so a replay in virtual time uses it
too. ``RouterQueue`` lets asyncio tasks wait in that order.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from attrs import define, field, frozen

from commutator.contract.routing import BusyConfig
from commutator.errors import RoutingError

__all__ = [
    "Place",
    "Refusal",
    "RequestQueue",
    "RouterQueue",
]

ResultT = TypeVar("ResultT")


Attempt = Callable[[], ResultT | None]
"""Tries to get a worker that is not busy; None when there is none."""


Refusal = Callable[[str, str, float], RoutingError]
"""Makes the error of a refused request from a reason code, a clause for people, and the seconds
after which to try again."""


_NEAR = 32
"""The number of requests at the head of the queue whose turn counts as near."""


@define(eq=False)
class _Waiter(Generic[ResultT]):
    attempt: Attempt[ResultT]
    turn: asyncio.Future[ResultT]
    on_near: Callable[[], None] | None
    """Called once, when the request's turn is near."""


@frozen(order=True)
class Place:
    """A position in the queue. The smallest is served first."""

    priority: int
    number: int
    """Counts arrivals, so that equal priorities are served in their order."""


class RouterQueue(Generic[ResultT]):
    """Admits requests as workers become free, in the order of their places.

    The queue protects the workers and respects priorities; ``frontend.limits`` protects the
    front-door process. There is no polling: the owner calls ``wake`` when a worker's load has
    fallen or a worker has come up. Then the first request tries again, then the next, until one
    finds every worker busy. A successful attempt adds its load at once, so between wake-ups a
    waiting request means that every worker is busy.
    """

    def __init__(
        self,
        config: BusyConfig,
        undo: Callable[[ResultT], None],
        refusal: Refusal,
        on_waiting: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``undo`` releases the result of an attempt whose request was cancelled before it got it.

        ``on_waiting`` is called with 1 when a request begins to wait, -1 when it stops.
        """
        self._queue = RequestQueue(config.max_queued_requests)
        self._max_queue_s = config.max_queue_s
        self._undo = undo
        self._refusal = refusal
        self._on_waiting = on_waiting
        self._waiters: dict[Place, _Waiter[ResultT]] = {}
        self._arrivals: list[tuple[float, int]] = []
        """(``arrived_s``, ``Place.number``) of every waiter, sorted."""
        self._woken = False
        self._recent_wait_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """Seconds that the longest-waiting request has waited; 0 when the queue is empty."""
        if not self._arrivals:
            return 0.0
        return asyncio.get_running_loop().time() - self._arrivals[0][0]

    def place(self, priority: int) -> Place:
        """The position of a request that arrives now; lower priorities are served first."""
        return self._queue.place(priority)

    async def admit(
        self,
        place: Place,
        arrived_s: float,
        attempt: Attempt[ResultT],
        *,
        again: bool,
        on_near: Callable[[], None] | None = None,
    ) -> tuple[ResultT, float]:
        """Wait for a worker. Returns the result of ``attempt`` and the seconds waited.

        ``arrived_s``: when the request arrived, by the loop's clock. ``again``: the request was
        admitted before, but its worker could not be reached; it may enter a full queue.
        ``on_near`` is called once if the request waits and its turn is near. Raises the refusal
        when the queue is, or becomes, full of requests that are at least as urgent, or when the
        time limit passes; and any error of ``attempt``.
        """
        loop = asyncio.get_running_loop()
        # A request must not overtake one before it while a wake-up is scheduled.
        ahead = self._queue.first()
        if (ahead is None or place < ahead) and (result := attempt()) is not None:
            return result, 0.0
        if not self._queue.enter(place, again=again):
            last = self._queue.enter_for_last(place)
            if last is None:
                problem = f"the queue of {self.waiting} is full"
                raise self._refusal("router_queue_full", problem, self._recent_wait_s)
            self._displace(last)
        turn: asyncio.Future[ResultT] = loop.create_future()
        self._waiters[place] = _Waiter(attempt, turn, on_near)
        arrival = (arrived_s, place.number)
        insort(self._arrivals, arrival)
        timer = loop.call_at(arrived_s + self._max_queue_s, self._expire, place)
        self._on_waiting(1)
        try:
            self._notify_near()
            result = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._undo(turn.result())
            raise
        finally:
            self._on_waiting(-1)
            timer.cancel()
            self._queue.leave(place)
            del self._waiters[place]
            del self._arrivals[bisect_left(self._arrivals, arrival)]
        self._recent_wait_s = loop.time() - arrived_s
        return result, self._recent_wait_s

    def wake(self) -> None:
        """A worker may have become free. Cheap with an empty queue; several calls count as one."""
        if not self._woken and self._queue.first() is not None:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._woken = False
        self._admit_waiting()
        self._notify_near()

    def _admit_waiting(self) -> None:
        while (place := self._queue.first()) is not None:
            waiter = self._waiters[place]
            if not waiter.turn.done():  # done: cancelled, but still in the queue
                try:
                    result = waiter.attempt()
                except Exception as error:  # noqa: BLE001 - belongs to the waiting request
                    waiter.turn.set_exception(error)
                else:
                    if result is None:
                        return
                    waiter.turn.set_result(result)
            self._queue.leave(place)

    def _notify_near(self) -> None:
        for place in self._queue.nearest(_NEAR):
            waiter = self._waiters[place]
            if (on_near := waiter.on_near) is not None:
                waiter.on_near = None
                on_near()

    def _displace(self, place: Place) -> None:
        turn = self._waiters[place].turn
        if not turn.done():
            problem = f"the queue of {self.waiting} is full, and more urgent requests came"
            turn.set_exception(
                self._refusal("router_queue_displaced", problem, self._recent_wait_s)
            )

    def _expire(self, place: Place) -> None:
        turn = self._waiters[place].turn
        if not turn.done():
            self._queue.leave(place)
            self._recent_wait_s = self._max_queue_s
            problem = f"none became free within {self._max_queue_s:g} s"
            turn.set_exception(self._refusal("router_queue_timeout", problem, self._recent_wait_s))


@define
class RequestQueue:
    """A bounded queue with strict priorities.

    Priorities do not age: more urgent requests overtake a less urgent one as long as they keep
    coming, and only the queue's time limit bounds its wait. Engines' schedulers use the same
    order.
    """

    max_length: int
    _waiting: list[Place] = field(factory=list)
    _numbers: count[int] = field(factory=count)

    def __len__(self) -> int:
        return len(self._waiting)

    def place(self, priority: int) -> Place:
        """The position of a request that arrives now; it does not wait yet."""
        return Place(priority, next(self._numbers))

    def enter(self, place: Place, *, again: bool = False) -> bool:
        """Begin to wait. False if the queue is full; ``again`` ignores the limit."""
        if len(self._waiting) >= self.max_length and not again:
            return False
        insort(self._waiting, place)
        return True

    def enter_for_last(self, place: Place) -> Place | None:
        """Replace the last request of a full queue if it is less urgent.

        Returns the replaced position; None if every waiting request is at least as urgent.
        """
        last = self._waiting[-1] if self._waiting and self.max_length else None
        if last is None or last.priority <= place.priority:
            return None
        del self._waiting[-1]
        insort(self._waiting, place)
        return last

    def leave(self, place: Place) -> bool:
        """Stop waiting. False if the position was not in the queue."""
        index = bisect_left(self._waiting, place)
        if index == len(self._waiting) or self._waiting[index] != place:
            return False
        del self._waiting[index]
        return True

    def nearest(self, count: int) -> list[Place]:
        """The first ``count`` positions, in order."""
        return self._waiting[:count]

    def first(self) -> Place | None:
        """The next position to be served."""
        return self._waiting[0] if self._waiting else None
