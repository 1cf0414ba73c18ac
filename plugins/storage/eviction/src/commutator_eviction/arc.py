"""ARC: divides the room between recency and frequency, according to misses.

N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. T1 has
blocks used once, T2 blocks used again; B1 and B2 have the keys of blocks evicted from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_eviction.lru import first_evictable

Queue = OrderedDict[BlockKey, None]


class Arc(EvictionPolicy):
    """``capacity_blocks`` is the room that T1 and T2 share; it also bounds B1 and B2."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = max(1, capacity_blocks)
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_ghosts: Queue = OrderedDict()
        self._again_ghosts: Queue = OrderedDict()
        self._target = 0.0
        """Room that T1 should have (p in the paper)."""

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self._target = min(self._capacity, self._target + max(1.0, again / once))
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def touched(self, key: BlockKey, now_s: float) -> None:
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        elif key in self._again:
            self._again.move_to_end(key)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        for queue, ghosts in (
            (self._once, self._once_ghosts),
            (self._again, self._again_ghosts),
        ):
            if key in queue:
                del queue[key]
                if evicted:
                    ghosts[key] = None
        # T1 and B1 together have at most the capacity, all four at most twice that.
        held = len(self._once) + len(self._again)
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        ghosts_allowed = max(0, 2 * self._capacity - held - len(self._once_ghosts))
        while len(self._again_ghosts) > ghosts_allowed:
            self._again_ghosts.popitem(last=False)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        surplus = len(self._once) - int(self._target)
        from_once = first_evictable(self._once, min(count, surplus), evictable)
        found = from_once + first_evictable(self._again, count - len(from_once), evictable)
        if len(found) < count:
            chosen = set(found)
            rest = count - len(found)
            found += first_evictable(
                self._once, rest, lambda key: key not in chosen and evictable(key)
            )
        return found
