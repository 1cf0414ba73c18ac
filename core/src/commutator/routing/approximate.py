"""Guesses what a worker holds from what was routed to it, for engines without KV events. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from commutator.routing.prefix_index import PrefixIndex

__all__ = ["ApproximateBlocks"]


class ApproximateBlocks:
    """Assumes that a routed prompt's blocks stay on their worker for a while.

    They are dropped after ``ttl_s`` seconds without being routed there again, and earlier, the
    longest unused first, when they are more than the worker's cache can hold.
    """

    def __init__(self, index: PrefixIndex, ttl_s: float) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._used_s: dict[str, OrderedDict[int, float]] = {}
        """By worker: sequence hash to the time of its last use, longest unused first."""

    def routed(
        self, worker_id: str, sequence_hashes: Sequence[int], capacity_blocks: int, now_s: float
    ) -> None:
        """A prompt with these blocks went to the worker."""
        used = self._used_s.setdefault(worker_id, OrderedDict())
        # From the end to the beginning: what others share most must go last.
        for block in reversed(sequence_hashes):
            used[block] = now_s
            used.move_to_end(block)
        self._index.store(worker_id, sequence_hashes)
        self._drop(worker_id, max(0, len(used) - capacity_blocks))

    def expire(self, now_s: float) -> None:
        """Drop what was not used for too long; call it before looking anything up."""
        for worker_id, used in self._used_s.items():
            count = 0
            for last_used_s in used.values():
                if last_used_s + self._ttl_s > now_s:
                    break
                count += 1
            self._drop(worker_id, count)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        if self._used_s.pop(worker_id, None) is not None:
            self._index.remove_worker(worker_id)

    def _drop(self, worker_id: str, count: int) -> None:
        used = self._used_s[worker_id]
        if count:
            self._index.remove(worker_id, [used.popitem(last=False)[0] for _ in range(count)])
