"""Runs in the order of a time; an appointment made in a phase that a run has left is void."""

from __future__ import annotations

import heapq

from commutator_sim.request import Run

__all__ = ["Appointments"]


class Appointments:
    """A heap of runs. Of equal times the run that is first in order comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, tuple[int, int], int, Run]] = []

    def add(self, run: Run, time_ns: int = 0) -> None:
        heapq.heappush(self._heap, (time_ns, run.order, run.epoch, run))

    def first(self) -> Run | None:
        """The run whose turn is next; it stays."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].epoch:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def first_ns(self) -> int | None:
        """When that is."""
        return None if not self._heap or self.first() is None else self._heap[0][0]

    def pop(self) -> Run:
        """Take out the run that ``first`` returned."""
        return heapq.heappop(self._heap)[3]
