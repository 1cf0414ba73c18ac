"""The order of waiting requests, against a plain list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator.routing.queue import Place, RequestQueue


class Queue(RuleBasedStateMachine):
    """Few priorities, so that many are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(max_length=4)
        self.waiting: list[tuple[int, int, Place]] = []
        self.left: list[Place] = []
        self.arrivals = 0

    @rule(priority=st.integers(-1, 1))
    def arrive(self, priority: int) -> None:
        place = self.queue.place(priority)
        fits = len(self.waiting) < 4
        assert self.queue.enter(place) == fits
        if fits:
            self.waiting.append((priority, self.arrivals, place))
        self.arrivals += 1

    @precondition(lambda self: len(self.waiting) >= 4)
    @rule(priority=st.integers(-1, 1))
    def the_last_makes_room_for_a_more_urgent_class_only(self, priority: int) -> None:
        place = self.queue.place(priority)
        lowest, _, last = max(self.waiting)
        displaced = self.queue.enter_for_last(place)
        assert displaced == (last if lowest > priority else None)
        if displaced is not None:
            self.waiting.remove(max(self.waiting))
            self.waiting.append((priority, self.arrivals, place))
            self.left.append(displaced)
        self.arrivals += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def next_one_leaves_and_comes_back_to_its_place(self) -> None:
        place = min(self.waiting)[2]
        assert self.queue.leave(place)
        assert self.queue.enter(place, again=True)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        _, _, place = self.waiting.pop(which % len(self.waiting))
        assert self.queue.leave(place)
        self.left.append(place)

    @precondition(lambda self: self.left)
    @rule()
    def leave_twice(self) -> None:
        assert not self.queue.leave(self.left[-1])

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.first() == (min(self.waiting)[2] if self.waiting else None)


TestQueue = Queue.TestCase


def test_no_request_waits_in_a_queue_without_places() -> None:
    queue = RequestQueue(max_length=0)
    assert queue.enter(queue.place(1), again=True)
    assert queue.enter_for_last(queue.place(0)) is None


def test_a_full_queue_takes_back_a_request_admitted_before() -> None:
    queue = RequestQueue(max_length=1)
    first, second = queue.place(0), queue.place(0)
    assert queue.enter(second)
    assert not queue.enter(first)
    assert queue.enter(first, again=True)
    assert queue.first() == first
