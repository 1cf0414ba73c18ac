"""Evicts the block deepest in its chain: the fewest prompts share it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from commutator import (
    BlockKey,
    EvictionConfig,
    EvictionPolicy,
    EvictionRegister,
    RetentionHints,
    hookimpl,
)


class DeepestFirst(EvictionPolicy):
    """A heap by depth; at equal depth the block that came first goes first."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, tuple[int, int, BlockKey]] = {}
        self._heap: list[tuple[int, int, BlockKey]] = []
        self._added = 0

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        self._added += 1
        self._entries[key] = (-facts.depth, self._added, key)
        heapq.heappush(self._heap, self._entries[key])

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        self._entries.pop(key, None)  # its place in the heap is skipped when it comes up
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        found: list[BlockKey] = []
        looked_at = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) == entry:
                looked_at.append(entry)
                if evictable(entry[2]):
                    found.append(entry[2])
        for entry in looked_at:
            heapq.heappush(self._heap, entry)
        return found


@hookimpl
def eviction_register(register: EvictionRegister) -> None:
    register("deepest_first", EvictionConfig, lambda _config, _blocks: DeepestFirst())
