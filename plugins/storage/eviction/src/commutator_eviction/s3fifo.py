"""S3-FIFO: a small queue filters blocks used once; the main queue gives second chances.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_eviction.aside import Aside, Queue

_MOST_USES = 3


class S3Fifo(EvictionPolicy):
    """``small`` is the small queue's part of the capacity."""

    def __init__(self, capacity_blocks: int, small: float = 0.1) -> None:
        self._small_blocks = max(1, int(small * capacity_blocks))
        self._most_ghosts = max(1, capacity_blocks)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touched(self, key: BlockKey, now_s: float) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(_MOST_USES, queue[key] + 1)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        if self._small.pop(key, None) is not None:
            if evicted:
                self._ghosts[key] = None
                if len(self._ghosts) > self._most_ghosts:
                    self._ghosts.popitem(last=False)
        else:
            self._main.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        found: list[BlockKey] = []
        with Aside() as aside:
            while len(found) < count:
                queues = [self._main, self._small]
                if len(self._small) > self._small_blocks:
                    queues.reverse()
                # The main queue again: blocks of the small queue may have moved there.
                tries = (self._oldest(one, evictable, aside) for one in (*queues, self._main))
                key = next((key for key in tries if key is not None), None)
                if key is None:
                    break
                found.append(key)
        return found

    def _oldest(
        self, queue: Queue, evictable: Callable[[BlockKey], bool], aside: Aside
    ) -> BlockKey | None:
        """The first evictable key without uses; moves keys with uses to the main queue's end."""
        while queue:
            key, uses = queue.popitem(last=False)
            if queue is self._small and uses > 1:
                self._main[key] = 0
            elif queue is self._main and uses > 0:
                self._main[key] = uses - 1
            else:
                aside.put(queue, key, uses)
                if evictable(key):
                    return key
        return None
