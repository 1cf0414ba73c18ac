"""Leaf first: evicts ends of chains, because a block is useless without the one before it.

Among the ends, the least recently used goes first. O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice

from attrs import define

from commutator import BlockKey, EvictionPolicy, RetentionHints


@define
class _Block:
    parent: BlockKey | None
    used: int
    """Sequence number of its last use."""
    queued: bool = False


class LeafFirst(EvictionPolicy):
    """A heap of ends by last use; stale entries are corrected when they are popped."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, _Block] = {}
        self._children: dict[BlockKey, int] = {}
        """The number of blocks that directly follow a key."""
        self._ends: list[tuple[int, BlockKey]] = []
        self._uses = 0

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        self._uses += 1
        self._blocks[key] = _Block(parent, self._uses)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if key not in self._children:
            self._queue(key)

    def touched(self, key: BlockKey, now_s: float) -> None:
        if (block := self._blocks.get(key)) is not None:
            self._uses += 1
            block.used = self._uses

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        block = self._blocks.pop(key, None)
        if block is None or block.parent is None:
            return
        left = self._children[block.parent] - 1
        if left:
            self._children[block.parent] = left
        else:
            del self._children[block.parent]
            self._queue(block.parent)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        found: dict[BlockKey, None] = {}
        going: dict[BlockKey, int] = {}
        again: list[BlockKey] = []
        while len(found) < count and (key := self._pop_end(going)) is not None:
            again.append(key)
            if evictable(key):
                found[key] = None
                parent = self._blocks[key].parent
                if parent is not None:
                    going[parent] = going.get(parent, 0) + 1
                    if going[parent] == self._children[parent]:
                        self._queue(parent)
        for key in again:
            self._queue(key)
        if len(found) < count:  # no evictable end is left: evict blocks before them
            oldest = sorted(self._blocks, key=lambda key: self._blocks[key].used)
            others = (key for key in oldest if key not in found and evictable(key))
            found.update(dict.fromkeys(islice(others, count - len(found))))
        return list(found)

    def _queue(self, key: BlockKey) -> None:
        block = self._blocks.get(key)
        if block is None or block.queued:
            return
        block.queued = True
        heapq.heappush(self._ends, (block.used, key))
        if len(self._ends) > 2 * len(self._blocks) + 64:
            live = [k for k, known in self._blocks.items() if known.queued]
            self._ends = [(self._blocks[k].used, k) for k in live]
            heapq.heapify(self._ends)

    def _pop_end(self, going: dict[BlockKey, int]) -> BlockKey | None:
        """The least recently used end, given that the blocks in ``going`` are evicted."""
        while self._ends:
            used, key = heapq.heappop(self._ends)
            block = self._blocks.get(key)
            if block is None or not block.queued:
                continue
            if used < block.used:
                heapq.heappush(self._ends, (block.used, key))
                continue
            block.queued = False
            if self._children.get(key, 0) == going.get(key, 0):
                return key
        return None
