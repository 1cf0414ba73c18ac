"""W-TinyLFU: evicts by frequency of use, with ageing counts and a small window for new blocks.

G. Einziger, R. Friedman and B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13 (2017). Unlike there, every block is stored; one that the paper
would not admit is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_eviction.aside import Aside, Queue
from commutator_eviction.sketch import FrequencySketch

__all__ = ["TinyLfu"]

_PROTECTED = 0.8
"""Part of the main room for blocks that were used again in it."""


class TinyLfu(EvictionPolicy):
    """``window`` is the part of the capacity for new blocks."""

    def __init__(self, capacity_blocks: int, window: float = 0.01) -> None:
        self._window_blocks = max(1, int(window * capacity_blocks))
        self._main_blocks = max(1, capacity_blocks - self._window_blocks)
        self._protected_blocks = int(_PROTECTED * self._main_blocks)
        self._window: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._seen = FrequencySketch(capacity_blocks)

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        self._seen.add(key)
        self._window[key] = 0

    def touched(self, key: BlockKey, now_s: float) -> None:
        if key in self._probation:
            del self._probation[key]
            self._protected[key] = 0
            if len(self._protected) > self._protected_blocks:
                oldest, _ = self._protected.popitem(last=False)
                self._probation[oldest] = 0
        elif key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._window:
            self._window.move_to_end(key)
        else:
            return
        self._seen.add(key)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        for queue in (self._window, self._probation, self._protected):
            queue.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        self._fill_main()
        found: list[BlockKey] = []
        with Aside() as aside:
            while len(found) < count:
                # The block that needs the room will enter the window and push out its oldest.
                pushed = len(self._window) + count - len(found) > self._window_blocks
                queue = self._loser(evictable, aside, pushed=pushed)
                if queue is None:
                    break
                key, value = queue.popitem(last=False)
                aside.put(queue, key, value)
                found.append(key)
        return found

    def _fill_main(self) -> None:
        room = self._main_blocks - len(self._probation) - len(self._protected)
        for _ in range(min(room, len(self._window) - self._window_blocks)):
            key, _ = self._window.popitem(last=False)
            self._probation[key] = 0

    def _loser(
        self, evictable: Callable[[BlockKey], bool], aside: Aside, *, pushed: bool
    ) -> Queue | None:
        """The queue whose front is evicted next."""
        new = _front(self._window, evictable, aside) if pushed else None
        queue, old = self._probation, _front(self._probation, evictable, aside)
        if old is None:
            queue, old = self._protected, _front(self._protected, evictable, aside)
        if old is None:
            new = _front(self._window, evictable, aside)
            return self._window if new is not None else None
        if new is None or self._seen.of(new) <= self._seen.of(old):
            return queue if new is None else self._window
        del self._window[new]
        self._probation[new] = 0
        return queue


def _front(queue: Queue, evictable: Callable[[BlockKey], bool], aside: Aside) -> BlockKey | None:
    """The first evictable key, moved to the front."""
    while queue:
        key = next(iter(queue))
        if evictable(key):
            return key
        aside.put(queue, *queue.popitem(last=False))
    return None
