"""LRU: evicts the least recently used block first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from commutator import BlockKey, EvictionPolicy, RetentionHints


class Lru(EvictionPolicy):
    """One queue in order of use. Each use takes O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        self._order[key] = None

    def touched(self, key: BlockKey, now_s: float) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        self._order.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        return first_evictable(self._order, count, evictable)


def first_evictable(
    keys: Iterable[BlockKey], count: int, evictable: Callable[[BlockKey], bool]
) -> list[BlockKey]:
    """The first ``count`` evictable keys."""
    found: list[BlockKey] = []
    if count > 0:
        for key in keys:
            if evictable(key):
                found.append(key)
                if len(found) == count:
                    break
    return found
