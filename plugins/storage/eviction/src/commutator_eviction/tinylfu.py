"""W-TinyLFU: evicts by frequency of use, with ageing counts and a small window for new blocks.

G. Einziger, R. Friedman and B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13 (2017). Unlike there, every block is stored; one that the paper
would not admit is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import xxhash

from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_eviction.aside import Aside, Queue

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


_ROWS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MOST = 15
_WIDEST = 1 << 22
_HALVE = bytes(value // 2 for value in range(256))
_CELLS_PER_KEY = 4
_SAMPLES_PER_KEY = 10
_WORD = (1 << 64) - 1


class FrequencySketch:
    """A count-min sketch: four rows of small counters, halved after ten additions per key.

    G. Einziger, R. Friedman and B. Manes, "TinyLFU", ACM Transactions on Storage 13 (2017).
    """

    def __init__(self, keys: int) -> None:
        width = 64
        while width < min(_CELLS_PER_KEY * keys, _WIDEST):
            width *= 2
        self._shift = 64 - (width.bit_length() - 1)
        self._rows = [bytearray(width) for _ in _ROWS]
        self._sample = _SAMPLES_PER_KEY * max(keys, 16)
        self._seen = 0

    def add(self, key: bytes) -> None:
        """Count one more occurrence of the key."""
        places = self._places(key)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._seen += 1
        if self._seen >= self._sample:
            self._rows = [row.translate(_HALVE) for row in self._rows]
            self._seen //= 2

    def of(self, key: bytes) -> int:
        """At least the true count, given the halvings, up to the limit of 15."""
        return min(row[p] for row, p in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: bytes) -> list[int]:
        number = xxhash.xxh3_64_intdigest(key)
        return [((number * odd) & _WORD) >> self._shift for odd in _ROWS]
