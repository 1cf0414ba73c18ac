"""KV blocks that go from one modelled worker to another: what is held for it, and the link."""

from __future__ import annotations

from collections.abc import Sequence

from commutator_sim.cache import BlockCache
from commutator_sim.request import Run

__all__ = ["Exports", "Link"]


class Exports:
    """Computed blocks that stay until another worker has them, whatever becomes of their run."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._held: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, key: int) -> None:
        """Request ``key`` was submitted, and its blocks are for another worker."""
        self._held[key] = []

    def extend(self, run: Run) -> bool:
        """Hold what ``run`` has computed or found by now. Returns whether that is more."""
        held = self._held.get(run.key)
        if held is None or run.named <= len(held):
            return False
        fresh: Sequence[int] = run.request.block_keys[len(held) : run.named]
        self._cache.pin(fresh)
        held += fresh
        return True

    def release(self, key: int) -> None:
        """Hold nothing any more for request ``key``. Harmless when nothing is held."""
        self._cache.release(self._held.pop(key, ()), 0)


class Link:
    """What one worker receives over: one transfer after the other, each ``latency_ns`` later."""

    def __init__(self, latency_ns: int, block_ns: int) -> None:
        self._latency_ns = latency_ns
        self._block_ns = block_ns
        self._free_ns = 0

    def pull(self, run: Run, limit: int, now_ns: int) -> int | None:
        """Begin to bring what is ready elsewhere of the run's first ``limit`` blocks.

        Returns when they are there if these were the last, otherwise None.
        """
        fresh = min(run.offered, limit) - run.pulled
        if fresh <= 0:
            return None
        run.pulled += fresh
        self._free_ns = max(self._free_ns, now_ns) + fresh * self._block_ns
        return self._free_ns + self._latency_ns if run.pulled == limit else None
