"""Guesses what a worker holds from what was routed to it, for engines without KV events. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from commutator.routing.overlap import WorkerRank
from commutator.routing.prefix_index import PrefixIndex

__all__ = ["ApproximateBlocks"]


class ApproximateBlocks:
    """Assumes that a routed prompt's blocks stay on their worker's rank for a while.

    They are dropped after ``ttl_s`` seconds without being routed there again, and earlier, the
    longest unused first, when they are more than the rank's cache can hold.
    """

    def __init__(self, index: PrefixIndex, ttl_s: float) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._used_s: dict[WorkerRank, OrderedDict[int, float]] = {}
        """By rank: sequence hash to the time of its last use, longest unused first."""

    def routed(
        self,
        owner: WorkerRank,
        sequence_hashes: Sequence[int],
        capacity_blocks: int | None,
        now_s: float,
    ) -> None:
        """A prompt with these blocks went there. None: how many fit is not known."""
        used = self._used_s.setdefault(owner, OrderedDict())
        # From the end to the beginning: what others share most must go last.
        for block in reversed(sequence_hashes):
            used[block] = now_s
            used.move_to_end(block)
        self._index.store(owner.worker_id, sequence_hashes, rank=owner.rank)
        if capacity_blocks is not None:
            self._drop(owner, max(0, len(used) - capacity_blocks))

    def expire(self, now_s: float) -> None:
        """Drop what was not used for too long; call it before looking anything up."""
        for owner, used in self._used_s.items():
            count = 0
            for last_used_s in used.values():
                if last_used_s + self._ttl_s > now_s:
                    break
                count += 1
            self._drop(owner, count)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        gone = [owner for owner in self._used_s if owner.worker_id == worker_id]
        for owner in gone:
            del self._used_s[owner]
        if gone:
            self._index.remove_worker(worker_id)

    def _drop(self, owner: WorkerRank, count: int) -> None:
        if count:
            used = self._used_s[owner]
            dropped = [used.popitem(last=False)[0] for _ in range(count)]
            self._index.remove(owner.worker_id, dropped, rank=owner.rank)
