"""Holds back the requests of one model while every worker is busy: ``RequestQueue`` in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import define

from commutator.config.model import BusyConfig
from commutator.errors import RoutingError
from commutator.routing.request_queue import Place, RequestQueue

__all__ = ["Admission", "Refusal"]

ResultT = TypeVar("ResultT")
Attempt = Callable[[], ResultT | None]
"""Asks the policy among the workers that are not busy; None when there is none."""
Refusal = Callable[[str, str, float], RoutingError]
"""Makes the error of a request that waits no longer: its reason in one word and in a clause, and
after how many seconds it may try again."""

_NEAR = 32
"""Whose turn comes soon: as many of the first as a few workers take next."""


@define(eq=False)
class _Waiter(Generic[ResultT]):
    attempt: Attempt[ResultT]
    turn: asyncio.Future[ResultT]
    arrived_s: float
    when_near: Callable[[], None] | None
    """To be called once, when its turn comes soon."""


class Admission(Generic[ResultT]):
    """Lets requests through as workers become free, in the order of their places.

    This protects the workers, and knows priorities; ``frontend.limiter`` protects the front-door
    process itself. Nobody polls: ``wake`` is called whenever some load fell or a worker came, and
    then the first in the queue tries again, then the next, until one finds every worker busy. An
    attempt takes its load at once, so between wake-ups a waiting request means busy workers.
    """

    def __init__(
        self,
        config: BusyConfig,
        undo: Callable[[ResultT], None],
        refusal: Refusal,
        waits: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``undo`` gives back what an attempt took for a request that was cancelled meanwhile.

        ``waits`` hears 1 when a request begins to wait, -1 when that ends.
        """
        self._queue = RequestQueue(config.max_queued_requests)
        self._max_queue_s = config.max_queue_s
        self._undo = undo
        self._refusal = refusal
        self._waits = waits
        self._waiters: dict[Place, _Waiter[ResultT]] = {}
        self._woken = False
        self._recent_wait_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """How long the request has waited that has waited longest; 0 without any."""
        if not self._waiters:
            return 0.0
        arrived_s = min(waiter.arrived_s for waiter in self._waiters.values())
        return asyncio.get_running_loop().time() - arrived_s

    def place(self, priority: int) -> Place:
        """For a request that arrives now; lower priorities are served first."""
        return self._queue.place(priority)

    async def admit(
        self,
        place: Place,
        arrived_s: float,
        attempt: Attempt[ResultT],
        *,
        again: bool,
        when_near: Callable[[], None] | None = None,
    ) -> tuple[ResultT, float]:
        """What ``attempt`` found, and seconds of waiting, 0 without any.

        ``arrived_s``: when the request was first here, by the loop's clock. ``again``: it was
        admitted before, but the worker turned out to be dead; a full queue lets it in.
        ``when_near`` is called once if it waits and its turn comes soon. Raises a refusal when the
        queue is full, then or later, of requests that are at least as urgent, or when the time
        limit passes, and whatever ``attempt`` raises.
        """
        loop = asyncio.get_running_loop()
        # Who would be behind somebody must not be quicker than the wake-up that is on its way.
        ahead = self._queue.first()
        if (ahead is None or place < ahead) and (result := attempt()) is not None:
            return result, 0.0
        if not self._queue.enter(place, again=again):
            last = self._queue.enter_for_last(place)
            if last is None:
                words = f"the queue of {self.waiting} is full"
                raise self._refusal("router_queue_full", words, self._recent_wait_s)
            self._displace(last)
        turn: asyncio.Future[ResultT] = loop.create_future()
        self._waiters[place] = _Waiter(attempt, turn, arrived_s, when_near)
        timer = loop.call_at(arrived_s + self._max_queue_s, self._expire, place)
        self._waits(1)
        try:
            self._tell_near()
            result = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._undo(turn.result())
            raise
        finally:
            self._waits(-1)
            timer.cancel()
            self._queue.leave(place)
            del self._waiters[place]
        self._recent_wait_s = loop.time() - arrived_s
        return result, self._recent_wait_s

    def wake(self) -> None:
        """Some worker may have become free. Cheap when nobody waits; several calls are one."""
        if not self._woken and self._queue.first() is not None:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._woken = False
        self._let_through()
        self._tell_near()

    def _let_through(self) -> None:
        while (place := self._queue.first()) is not None:
            waiter = self._waiters[place]
            if not waiter.turn.done():  # otherwise it was cancelled a moment ago
                try:
                    result = waiter.attempt()
                except Exception as error:  # noqa: BLE001 - it is the request's, not the waker's
                    waiter.turn.set_exception(error)
                else:
                    if result is None:
                        return
                    waiter.turn.set_result(result)
            self._queue.leave(place)

    def _tell_near(self) -> None:
        for place in self._queue.nearest(_NEAR):
            waiter = self._waiters[place]
            if (tell := waiter.when_near) is not None:
                waiter.when_near = None
                tell()

    def _displace(self, place: Place) -> None:
        turn = self._waiters[place].turn
        if not turn.done():
            words = f"the queue of {self.waiting} is full, and more urgent requests came"
            turn.set_exception(self._refusal("router_queue_displaced", words, self._recent_wait_s))

    def _expire(self, place: Place) -> None:
        turn = self._waiters[place].turn
        if not turn.done():
            self._queue.leave(place)
            self._recent_wait_s = self._max_queue_s
            words = f"none became free within {self._max_queue_s:g} s"
            turn.set_exception(self._refusal("router_queue_timeout", words, self._recent_wait_s))
