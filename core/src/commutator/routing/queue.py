"""The queue of one model's requests that wait because every worker is busy.

``RequestQueue`` holds the order of the queue; it does no I/O, so a replay in virtual time uses it
too. ``RouterQueue`` lets asyncio tasks wait in that order.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from attrs import define, field

from commutator.contract.fairness import FairnessPolicy
from commutator.contract.routing import BusyConfig
from commutator.errors import RoutingError
from commutator.fairness import Fifo

ResultT = TypeVar("ResultT")

Attempt = Callable[[], ResultT | None]
"""Tries to get a worker that is not busy; None when there is none."""

Refusal = Callable[[str, str, float], RoutingError]
"""Makes the error of a refused request from a reason code, a clause for people, and the seconds
after which to try again."""

_NEAR = 32
"""The number of requests at the head of the queue whose turn counts as near."""
_ENOUGH_NEAR = 24
"""As long as more of those wait that were near once, no others are looked for."""

_MOST_VOID = 64
"""Void entries that the heap of flows may have, beside one for each flow."""


@define(eq=False)
class _Waiter(Generic[ResultT]):
    attempt: Attempt[ResultT]
    turn: asyncio.Future[ResultT]


class Place(NamedTuple):
    """A position in the queue. Of one flow, the smallest is served first."""

    priority: int
    number: int
    """Counts arrivals, so that equal priorities are served in their order: all are different."""
    flow: str | None = None
    """The flow of its principal; see ``FairnessPolicy.flow``."""
    weight: float = 1.0
    """The principal's weight."""


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
        fairness: FairnessPolicy | None = None,
        prompt_tokens: Callable[[ResultT], int] = lambda _: 0,
    ) -> None:
        """``undo`` releases the result of an attempt whose request was cancelled before it got it.

        ``on_waiting`` is called with 1 when a request begins to wait, -1 when it stops.
        ``fairness`` orders the requests of different principals; None: ``fifo``.
        ``prompt_tokens`` says how many tokens the worker computes before the first of the answer;
        they are charged at once.
        """
        self.order = RequestQueue(config.max_queued_requests, fairness or Fifo())
        """Makes the places that are admitted, and counts what is computed for them."""
        self._max_queue_s = config.max_queue_s
        self._undo = undo
        self._refusal = refusal
        self._on_waiting = on_waiting
        self._prompt_tokens = prompt_tokens
        self._waiters: dict[Place, _Waiter[ResultT]] = {}
        self._far: dict[Place, Callable[[], None]] = {}
        """``on_near`` of those in the queue whose turn has not been near yet."""
        self._arrivals: list[tuple[float, int]] = []
        """(``arrived_s``, ``Place.number``) of every waiter, sorted."""
        self._woken = False
        self._recent_wait_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self.order)

    @property
    def oldest_s(self) -> float:
        """Seconds that the longest-waiting request has waited; 0 when the queue is empty."""
        if not self._arrivals:
            return 0.0
        return asyncio.get_running_loop().time() - self._arrivals[0][0]

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
        when the queue is, or becomes, full of requests that are at least as urgent or of flows
        that have no more than their share of it, or when the time limit passes; and any error of
        ``attempt``.
        """
        loop = asyncio.get_running_loop()
        # Where a request waits, every worker is busy or a wake-up is scheduled.
        if not self.waiting and (result := attempt()) is not None:
            self.order.arrived(place)
            self._begin(place, result)
            return result, 0.0
        if not self.order.enter(place, again=again):
            last = self.order.enter_for_last(place)
            if last is None:
                problem = f"the queue of {self.waiting} is full"
                raise self._refusal("router_queue_full", problem, self._recent_wait_s)
            self._displace(last)
        turn: asyncio.Future[ResultT] = loop.create_future()
        self._waiters[place] = _Waiter(attempt, turn)
        if on_near is not None:
            self._far[place] = on_near
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
            self._leave(place)
            del self._waiters[place]
            del self._arrivals[bisect_left(self._arrivals, arrival)]
        self._recent_wait_s = loop.time() - arrived_s
        return result, self._recent_wait_s

    def wake(self) -> None:
        """A worker may have become free. Cheap with an empty queue; several calls count as one."""
        if not self._woken and self.order.first() is not None:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._woken = False
        self._admit_waiting()
        self._notify_near()

    def _admit_waiting(self) -> None:
        while (place := self.order.first()) is not None:
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
                    self._begin(place, result)
            self._leave(place)

    def _begin(self, place: Place, result: ResultT) -> None:
        # At once, so that the next free worker of this wake-up is another flow's.
        self.order.admitted(place, self._prompt_tokens(result))

    def _notify_near(self) -> None:
        if not self._far:
            return
        if len(self.order) <= _NEAR:
            near = list(self._far)  # all, whatever their order
        elif len(self.order) - len(self._far) <= _ENOUGH_NEAR:
            near = self.order.nearest(_NEAR)
        else:
            return
        for place in near:
            if (on_near := self._far.pop(place, None)) is not None:
                on_near()

    def _leave(self, place: Place) -> None:
        self.order.leave(place)
        self._far.pop(place, None)

    def _displace(self, place: Place) -> None:
        self._far.pop(place, None)
        turn = self._waiters[place].turn
        if not turn.done():
            problem = f"the queue of {self.waiting} is full, and more urgent requests came"
            if self.order.flows > 1:
                problem += ", or requests of others who have fewer waiting"
            turn.set_exception(
                self._refusal("router_queue_displaced", problem, self._recent_wait_s)
            )

    def _expire(self, place: Place) -> None:
        turn = self._waiters[place].turn
        if not turn.done():
            self._leave(place)
            self._recent_wait_s = self._max_queue_s
            problem = f"none became free within {self._max_queue_s:g} s"
            turn.set_exception(self._refusal("router_queue_timeout", problem, self._recent_wait_s))


_Entry = tuple[float, Place, str | None]
"""A flow's rank, its first place and its name; places are all different."""


@define
class RequestQueue:
    """A bounded queue of flows in the order of a fairness policy, with strict priorities in each.

    Priorities do not age: more urgent requests of a flow overtake a less urgent one of the same
    flow as long as they keep coming, and only the queue's time limit bounds its wait. Engines'
    schedulers use the same order.

    A full queue is shared by the flows in proportion to their weights: a flow with less than its
    share displaces the last request of the one that has the most.
    """

    max_length: int
    _policy: FairnessPolicy = field(factory=Fifo)
    _flows: dict[str | None, list[Place]] = field(factory=dict)
    """Those that have requests waiting, each with its places, sorted."""
    _entries: dict[str | None, _Entry] = field(factory=dict)
    """By flow, its entry in the heap of flows; other entries are void."""
    _heap: list[_Entry] = field(factory=list)
    _changed: set[str | None] = field(factory=set)
    """Waiting flows whose entry in the heap may be outdated."""
    _length: int = 0
    _numbers: count[int] = field(factory=count)

    def __len__(self) -> int:
        return self._length

    @property
    def flows(self) -> int:
        """The number of flows that have requests waiting."""
        return len(self._flows)

    def place(self, priority: int, principal: str | None = None, weight: float = 1.0) -> Place:
        """The position of a request that arrives now; lower priorities are served first."""
        return Place(priority, next(self._numbers), self._policy.flow(principal), weight)

    def arrived(self, place: Place) -> None:
        """A request need not wait, and is admitted next; see ``FairnessPolicy.arrived``."""
        self._policy.arrived(place.flow, place.weight)

    def enter(self, place: Place, *, again: bool = False) -> bool:
        """Begin to wait. False if the queue is full; ``again`` ignores the limit."""
        if self._length >= self.max_length and not again:
            return False
        self._insert(place)
        return True

    def enter_for_last(self, place: Place) -> Place | None:
        """Replace ``replaceable`` by ``place``. Returns the replaced position, if there is one."""
        last = self.replaceable(place)
        if last is not None:
            self.leave(last)
            self._insert(place)
        return last

    def replaceable(self, place: Place) -> Place | None:
        """The position of a full queue that makes room for ``place``; None if there is none.

        The last one of the flow that has the most waiting in proportion to its weight, if that is
        more than the flow of ``place`` would have; otherwise the last of its own flow, if it is
        less urgent.
        """
        if not self._length or not self.max_length:
            return None
        own = self._flows.get(place.flow)
        longest = max(self._flows.values(), key=_share)
        own_share = ((0 if own is None else len(own)) + 1) / place.weight
        if longest is not own and _share(longest) > own_share:
            return longest[-1]
        if own is not None and own[-1].priority > place.priority:
            return own[-1]
        return None

    def leave(self, place: Place) -> bool:
        """Stop waiting. False if the position was not in the queue."""
        name = place.flow
        places = self._flows.get(name)
        if places is None:
            return False
        index = bisect_left(places, place)
        if index == len(places) or places[index] != place:
            return False
        self._length -= 1
        if len(places) == 1:
            del self._flows[name]
            self._entries.pop(name, None)
            self._changed.discard(name)
        else:
            del places[index]
            if index == 0:
                self._changed.add(name)
        return True

    def admitted(self, place: Place, prompt_tokens: int) -> None:
        """The request got its worker, whether or not it waited, which computes its prompt."""
        flow = place.flow
        self._policy.admitted(flow)
        self._policy.charge(flow, place.weight, prompt_tokens, 0)
        if flow in self._flows:
            self._changed.add(flow)

    def charge(self, place: Place, prompt_tokens: int, generated_tokens: int) -> None:
        """Count tokens that the workers compute for the flow of ``place``."""
        flow = place.flow
        self._policy.charge(flow, place.weight, prompt_tokens, generated_tokens)
        if flow in self._flows:
            self._changed.add(flow)

    def nearest(self, count: int) -> list[Place]:
        """About the first ``count`` positions, as if each flow's turn came once in each round.

        Exact for the first one, and for a queue of one flow.
        """
        self._first_entry()
        if len(self._flows) == 1:
            (places,) = self._flows.values()
            return places[:count]
        # The root of a heap and what lies next to it are small, if not the smallest.
        near = self._heap[: 2 * count]
        heads = sorted(entry for entry in near if self._entries.get(entry[2]) is entry)
        waiting = [self._flows[name] for _, _, name in heads[:count]]
        found: list[Place] = []
        for turn in range(count):
            waiting = [places for places in waiting if turn < len(places)]
            if not waiting or len(found) >= count:
                break
            found += [places[turn] for places in waiting]
        return found[:count]

    def first(self) -> Place | None:
        """The next position to be served."""
        entry = self._first_entry()
        return None if entry is None else entry[1]

    def _insert(self, place: Place) -> None:
        name = place.flow
        places = self._flows.get(name)
        self._length += 1
        if places is None:
            self._policy.arrived(name, place.weight)
            self._flows[name] = [place]
            self._changed.add(name)
            return
        insort(places, place)
        if places[0] is place:
            self._changed.add(name)

    def _first_entry(self) -> _Entry | None:
        flows = self._flows
        if not flows:
            return None
        heap, entries = self._heap, self._entries
        if self._changed:
            for name in self._changed:
                entry = entries[name] = (self._policy.rank(name), flows[name][0], name)
                heapq.heappush(heap, entry)
            self._changed.clear()
            if len(heap) > 2 * len(flows) + _MOST_VOID:
                heap = self._heap = list(entries.values())
                heapq.heapify(heap)
        while entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]


def _share(places: list[Place]) -> float:
    return len(places) / places[-1].weight
