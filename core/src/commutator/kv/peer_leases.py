"""Which slots are kept for which reader, and until when. Pure: the time is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from commutator.kv.tier import Slot

__all__ = ["NO_LEASE", "LeaseTable"]

NO_LEASE = 0
"""The number that no lease has."""


class LeaseTable:
    """A slot is kept once for each lease that has it. Leases end by themselves."""

    def __init__(self, lease_s: float, most_slots: int) -> None:
        """``most_slots`` bounds what all leases keep together."""
        self._lease_s = lease_s
        self._most = most_slots
        self._last = NO_LEASE
        self._kept: dict[int, set[Slot]] = {}
        self._ends: list[tuple[float, int]] = []
        self._count = 0

    @property
    def room(self) -> int:
        """How many more slots can be kept now."""
        return self._most - self._count

    @property
    def kept(self) -> int:
        return self._count

    @property
    def leases(self) -> int:
        """How many have not ended by time; of some, all may have come back."""
        return len(self._ends)

    def grant(self, slots: Collection[Slot], now_s: float) -> int:
        """Keep these, at most ``room`` and none twice; the new lease's number."""
        wanted = set(slots)
        if len(wanted) != len(slots) or len(wanted) > self.room:
            raise ValueError(f"{len(slots)} slots cannot be kept, with room for {self.room}")
        self._last += 1
        self._kept[self._last] = wanted
        self._count += len(wanted)
        heapq.heappush(self._ends, (now_s + self._lease_s, self._last))
        return self._last

    def release(self, lease: int, slots: Iterable[Slot]) -> list[Slot]:
        """The reader is done; those that the lease did keep, to be unpinned once each."""
        kept = self._kept.get(lease, set())
        done = kept.intersection(slots)
        kept -= done
        if not kept:
            self._kept.pop(lease, None)
        self._count -= len(done)
        return sorted(done)

    def expire(self, now_s: float) -> list[Slot]:
        """What the leases kept that ended by now, to be unpinned once for each time it is named."""
        freed: list[Slot] = []
        while self._ends and self._ends[0][0] <= now_s:
            _, lease = heapq.heappop(self._ends)
            freed += self.release(lease, self._kept.get(lease, ()))
        return freed

    def end_all(self) -> list[Slot]:
        """As ``expire`` after the last lease's end."""
        return self.expire(float("inf"))
