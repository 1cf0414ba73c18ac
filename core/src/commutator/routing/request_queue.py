"""The order in which requests wait for a worker: by priority, then by arrival. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from attrs import define, field, frozen

__all__ = ["Place", "RequestQueue"]


@frozen(order=True)
class Place:
    """Where a request stands. Smaller goes first."""

    priority: int
    number: int
    """Of its arrival, so that equal priorities keep their order."""


@define
class RequestQueue:
    """A bounded queue with strict priorities.

    Nothing ages: a request of a low class is overtaken for as long as higher ones keep coming. Its
    wait is bounded all the same, by the time limit of the queue, and then it is told so; that is
    one rule to understand instead of two, and the same order as in the engines' own schedulers.
    """

    max_length: int
    _waiting: list[Place] = field(factory=list)
    _numbers: count[int] = field(factory=count)

    def __len__(self) -> int:
        return len(self._waiting)

    def place(self, priority: int) -> Place:
        """For a request that arrives now; it does not wait yet."""
        return Place(priority, next(self._numbers))

    def enter(self, place: Place, *, again: bool = False) -> bool:
        """Wait. False when the queue is full, which does not matter to who comes ``again``."""
        if len(self._waiting) >= self.max_length and not again:
            return False
        insort(self._waiting, place)
        return True

    def enter_for_last(self, place: Place) -> Place | None:
        """Wait although the queue is full: instead of the last of the lowest class.

        Returns whose place it was. None: nobody waits in a lower class than this one.
        """
        last = self._waiting[-1] if self._waiting and self.max_length else None
        if last is None or last.priority <= place.priority:
            return None
        del self._waiting[-1]
        insort(self._waiting, place)
        return last

    def leave(self, place: Place) -> bool:
        """Wait no longer. False when it did not."""
        index = bisect_left(self._waiting, place)
        if index == len(self._waiting) or self._waiting[index] != place:
            return False
        del self._waiting[index]
        return True

    def nearest(self, count: int) -> list[Place]:
        """The first ``count``, in their order."""
        return self._waiting[:count]

    def first(self) -> Place | None:
        """Whose turn is next."""
        return self._waiting[0] if self._waiting else None
