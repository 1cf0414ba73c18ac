"""Limits of one front-door process: how many requests run and wait, and how long each may take.

There are two queues. The one here bounds how many requests a front door has in hand at once
(``max_concurrent_requests`` run, ``max_queued_requests`` wait, shared fairly between principals):
it protects the memory and the event loop of the process. The one of ``commutator.routing.queue``
bounds how much work the workers of a model have: it knows their load, and orders requests by
fairness and priority. A request that waits there gives up its place here, so that the limits do not
add up: a deployment whose workers are all busy must not keep out the urgent request that could get
the next free worker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from attrs import define

from commutator.contract.fairness import FairnessPolicy
from commutator.contract.request import Caller
from commutator.errors import DeadlineError, OverloadedError
from commutator.routing.queue import Place, RequestQueue


class _PlaceShares(FairnessPolicy):
    """A flow ranks by the places that its requests hold, in proportion to its weight."""

    def __init__(self) -> None:
        self._held: dict[str | None, float] = {}

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """Here a request is charged with 1, and with -1 when it ends."""
        held = self._held.get(flow, 0.0) + prompt_tokens / weight
        if held > _ROUNDING:
            self._held[flow] = held
        else:
            self._held.pop(flow, None)

    def rank(self, flow: str | None) -> float:
        return self._held.get(flow, 0.0)


_ROUNDING = 1e-9
"""Less than one request of the largest weight; what remains when the last one of a flow ends."""


class ConcurrencyLimiter:
    """Up to ``max_running`` requests hold a place; up to ``max_waiting`` others wait for one.

    A free place goes to the principal whose requests hold the fewest, in proportion to its weight;
    its requests come in order of arrival. A request that waits for a worker still counts for its
    principal. When the queue is full, a request is refused: the newest of the principal that has
    the most waiting. So no principal can keep others out.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running = 0
        self._max_running = max_running
        self._shares = _PlaceShares()
        self._queue = RequestQueue(max_waiting, self._shares)
        self._turns: dict[Place, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        return len(self._turns)

    @property
    def is_full(self) -> bool:
        """Whether every place is taken, and every place of the queue."""
        return self.running >= self._max_running and self.waiting >= self._queue.max_length

    def resize(self, max_running: int, max_waiting: int) -> None:
        """Other limits from now on. More may run and wait until enough have ended."""
        self._max_running, self._queue.max_length = max_running, max_waiting
        while self._turns and self.running < self._max_running:
            self._admit_next()

    def check(self, caller: Caller) -> None:
        """Raise OverloadedError if a request of ``caller`` would be refused now."""
        if self.is_full:
            place = self._queue.place(0, caller.principal, caller.weight)
            if self._queue.replaceable(place) is None:
                raise self._refusal("the queue is full")

    def of(self, caller: Caller) -> HeldPlace:
        """Hold one of the places for a request of ``caller``, as ``async with limiter.of(caller)``.

        Raises OverloadedError when the queue is full, or becomes so by requests of others.
        """
        return HeldPlace(self, caller)

    async def enter(self, caller: Caller) -> None:
        """Take a place, or wait for one. Raises as ``of`` does."""
        if self.running < self._max_running:
            self._begin(caller.principal, caller.weight)
        else:
            await self._wait(self._queue.place(0, caller.principal, caller.weight))

    def leave(self, principal: str | None, weight: float) -> None:
        """Give a place of ``principal`` to the next request."""
        self.running -= 1
        self._count(principal, weight, -1)
        self._admit_next()

    def stepped(self, change: int) -> None:
        """A running request stepped aside (1) or came back (-1), even if all places are taken."""
        self.running -= change
        if change > 0:
            self._admit_next()

    async def _wait(self, place: Place) -> None:
        if not self._queue.enter(place):
            last = self._queue.enter_for_last(place)
            if last is None:
                raise self._refusal("the queue is full")
            turn = self._turns.pop(last)
            if not turn.done():
                turn.set_exception(self._refusal("the queue is full, and others have fewer in it"))
        turn = self._turns[place] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if self._turns.pop(place, None) is not None:
                self._queue.leave(place)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(place.flow, place.weight)  # its turn had come already
            raise

    def _begin(self, principal: str | None, weight: float) -> None:
        self.running += 1
        self._count(principal, weight, 1)

    def _count(self, principal: str | None, weight: float, change: int) -> None:
        """``principal`` holds so many places more; who waits may have another rank by that."""
        if self._turns:
            self._queue.charge(self._queue.place(0, principal, weight), change, 0)
        else:
            self._shares.charge(principal, weight, change, 0)

    def _admit_next(self) -> None:
        if not self._turns or self.running >= self._max_running:
            return
        place = self._queue.first()
        assert place is not None  # each turn belongs to one that waits
        self._queue.leave(place)
        self._begin(place.flow, place.weight)
        turn = self._turns.pop(place)
        if not turn.done():
            turn.set_result(None)
        else:  # it was cancelled, and has not resumed yet
            self.leave(place.flow, place.weight)

    def _refusal(self, problem: str) -> OverloadedError:
        return OverloadedError(
            f"{self.running} requests run and {self.waiting} wait: {problem}; try again soon"
        )


@define
class HeldPlace:
    """A place of a ``ConcurrencyLimiter``, held inside ``async with``. One is made per request."""

    _limiter: ConcurrencyLimiter
    _caller: Caller

    async def __aenter__(self) -> None:
        await self._limiter.enter(self._caller)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.leave(self._caller.principal, self._caller.weight)


@define
class LogprobBudget:
    """Log probabilities that one process keeps for its clients, alternatives included.

    A small request can have millions of them, of some hundred bytes each, if its client does not
    read them or wants its answers whole.
    """

    most: int
    """Of all requests together."""
    requests: int
    """The most requests at the same time: each may always keep its share."""
    held: int = 0

    @property
    def share(self) -> int:
        return self.most // self.requests


@define
class HeldLogprobs:
    """Those of one request."""

    _budget: LogprobBudget
    count: int = 0

    def add(self, count: int) -> None:
        """Raises OverloadedError, and adds nothing, where there is no room."""
        budget, held = self._budget, self.count + count
        if held > budget.share and budget.held + count > budget.most:
            raise OverloadedError(
                f"{budget.held} log probabilities are kept for clients, of at most {budget.most} "
                "(frontend.max_logprobs): lower n, max_tokens or the number of alternatives, or "
                "read a stream faster",
                reason="too_many_logprobs",
            )
        self.count = held
        budget.held += count

    def give_back(self, count: int) -> None:
        self.count -= count
        self._budget.held -= count


_LAST_WORDS_S = 1.0
_POLL_S = 0.02
_REPORT_EVERY_S = 5.0
_CLOCK_S = 0.001
"""By which a loop may be early, as its timers count milliseconds."""


class TimeLimit:
    """An ``async with`` block that raises DeadlineError after ``timeout_s``."""

    def __init__(self, timeout_s: float, limits: TimeLimits) -> None:
        self._limits = limits
        self._timeout_s = timeout_s
        # One timer serves all limits: making and cancelling one takes longer than all else here.
        self._timer = asyncio.Timeout(None)
        self._shuts_down = False
        self.deadline_s = math.inf
        """By the event loop's clock; known inside. Infinite again once it has passed."""

    def cut(self, last_s: float) -> None:
        """End no later than ``last_s``, by the event loop's clock, as the front door shuts down."""
        if last_s < self.deadline_s < math.inf:
            self.deadline_s = last_s
            self._shuts_down = True

    def end(self) -> None:
        """The deadline has passed."""
        self.deadline_s = math.inf
        self._timer.reschedule(0.0)

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()
        self.deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        self._limits.begun(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._limits.ended(self)
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            why = f"the request took longer than its {self._timeout_s:g} s"
            if self._shuts_down:
                why = "this front door is shutting down and could not wait any longer; try again"
            raise DeadlineError(why) from late


class TimeLimits:
    """The time limits of all running requests, which can be ended together."""

    def __init__(self) -> None:
        self._running: set[TimeLimit] = set()
        self._last_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        """For the earliest deadline, or one before."""

    def of(self, timeout_s: float) -> TimeLimit:
        """The limit of one request, which counts as running while it is inside."""
        return TimeLimit(timeout_s, self)

    async def end_within(
        self, timeout_s: float, on_running: Callable[[int, float], None] | None = None
    ) -> None:
        """Limit all running and later requests to ``timeout_s``, and wait until none runs.

        Waits a little longer for requests that do not end at their limit. ``on_running`` is called
        at once and every 5 s, while any runs, with how many run and how many seconds they have.
        """
        loop = asyncio.get_running_loop()
        report_s = loop.time()
        last_s = self._last_s = report_s + timeout_s
        for limit in self._running:
            limit.cut(last_s)
        self._end_late()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(last_s + _LAST_WORDS_S):
                while self._running:
                    now_s = loop.time()
                    if on_running is not None and now_s >= report_s:
                        on_running(len(self._running), max(0.0, last_s - now_s))
                        report_s += _REPORT_EVERY_S
                    await asyncio.sleep(_POLL_S)

    def begun(self, limit: TimeLimit) -> None:
        self._running.add(limit)
        if self._last_s is not None:
            limit.cut(self._last_s)
        if self._timer is None or limit.deadline_s < self._timer.when():
            self._wake_at(limit.deadline_s)

    def ended(self, limit: TimeLimit) -> None:
        self._running.discard(limit)

    def _wake_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._end_late)

    def _end_late(self) -> None:
        """End what is past its deadline, and wait for the next one."""
        now_s = asyncio.get_running_loop().time() + _CLOCK_S
        for limit in [one for one in self._running if one.deadline_s <= now_s]:
            limit.end()
        next_s = min((one.deadline_s for one in self._running), default=math.inf)
        if next_s < math.inf:
            self._wake_at(next_s)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None
