"""The device's KV blocks: held, idle but reusable, or free. Pure accounting, without time.

A block's key stands for everything up to the block's end, so equal keys mean equal prefixes. The
set of keys is closed under prefixes: a request that holds a block also holds those before it, and
a chain is evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Counts blocks instead of numbering them; only blocks with a key can be found again."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._holders: dict[int, int] = {}
        """Number of requests that hold each key; at least one."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Keys that no request holds, least recently used first."""
        self._unnamed = 0
        """Held blocks without a key: not full yet, or of unknown content."""

    @property
    def used_blocks(self) -> int:
        return len(self._holders) + self._unnamed

    @property
    def idle_blocks(self) -> int:
        return len(self._idle)

    def __contains__(self, key: int) -> bool:
        return key in self._holders or key in self._idle

    def match(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
        """How many of the first ``limit`` keys are cached, and how many of those are idle."""
        holders, idle = self._holders, self._idle
        found = found_idle = 0
        for key in keys[:limit]:
            if key in idle:
                found_idle += 1
            elif key not in holders:
                break
            found += 1
        return found, found_idle

    def pin(self, keys: Sequence[int]) -> None:
        """Hold blocks that ``match`` found."""
        holders, idle = self._holders, self._idle
        for key in keys:
            if key in holders:
                holders[key] += 1
            else:
                del idle[key]
                holders[key] = 1

    def take(self, count: int) -> list[int]:
        """Hold ``count`` more blocks without a key; returns the keys evicted to make room.

        The caller has checked that they fit beside the held blocks.
        """
        self._unnamed += count
        held = len(self._holders) + self._unnamed + len(self._idle)
        if held <= self.capacity_blocks:
            return []
        excess = held - self.capacity_blocks
        return [self._idle.popitem(last=False)[0] for _ in range(excess)]

    def name(self, keys: Sequence[int]) -> int:
        """Give keys to held blocks without one, in order; returns how many were cached already.

        Those are the first of ``keys``; each is shared, and the block that held its copy is freed.
        """
        holders, idle = self._holders, self._idle
        known = 0
        for key in keys:
            if key in holders:
                holders[key] += 1
                known += 1
            else:
                if key in idle:
                    del idle[key]
                    known += 1
                holders[key] = 1
        self._unnamed -= len(keys)
        return known

    def release(self, keys: Sequence[int], unnamed: int) -> None:
        """Release the blocks of one request: the first ones by key, and ``unnamed`` others."""
        holders, idle = self._holders, self._idle
        for key in reversed(keys):  # the end of a chain is the first to be evicted
            if holders[key] > 1:
                holders[key] -= 1
            else:
                del holders[key]
                idle[key] = None
        self._unnamed -= unnamed

    def clear(self) -> list[int]:
        """Forget every idle block; returns their keys."""
        keys = list(self._idle)
        self._idle.clear()
        return keys
