"""KV blocks that go from one modelled worker to another: what is held, and what waits."""

from __future__ import annotations

from collections.abc import Sequence

from commutator_sim.appointments import Appointments
from commutator_sim.cache import BlockCache
from commutator_sim.events import Pulled, Pulling
from commutator_sim.parameters import SimParameters
from commutator_sim.request import Run

__all__ = ["Exports", "Pulls"]


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


class Pulls:
    """Requests that wait for another worker's blocks; one transfer comes after the other."""

    def __init__(self, parameters: SimParameters, loading: Appointments) -> None:
        """``loading`` gets each request for when its last block is here."""
        self._parameters = parameters
        self._loading = loading
        self._link_free_ns = 0

    def begin(self, run: Run, found: int, limit: int, now_ns: int) -> Pulling | Pulled:
        """``run`` has all its blocks; the first ``found`` are filled, and up to ``limit`` may be.

        Afterwards ``run.pulling`` tells whether it has to wait for any.
        """
        run.pulled, end = found, min(limit, run.request.pulls or 0)
        if found >= end:
            return self.end(run, now_ns)
        run.computed = end * self._parameters.block_size
        return Pulling(now_ns, run.key, found, end)

    def more(self, run: Run, now_ns: int) -> None:
        """Begin to bring what the other worker has ready by now."""
        end = run.computed // self._parameters.block_size
        fresh = min(run.offered, end) - run.pulled
        if fresh > 0:
            run.pulled += fresh
            begin_ns = max(self._link_free_ns, now_ns)
            self._link_free_ns = begin_ns + fresh * self._parameters.handover_block_ns
            if run.pulled == end:
                ready_ns = self._link_free_ns + self._parameters.handover_latency_ns
                self._loading.add(run, ready_ns)

    def end(self, run: Run, now_ns: int) -> Pulled:
        """It has all that it waited for."""
        run.pulling = False
        return Pulled(now_ns, run.key, run.pulled - run.named)
