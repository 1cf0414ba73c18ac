"""A consistent-hash ring of workers, unchanged while some of them are not candidates."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from hashlib import blake2b

__all__ = ["HashRing"]

_REMEMBERED = 1024


class HashRing:
    """The points of every known worker on the ring, until it is dropped.

    A worker that is not a candidate for a while keeps its points, and the caller passes over them.
    That gives the order of a ring without it, and the ring need not be rebuilt when it is back.
    """

    def __init__(self, points: int) -> None:
        """``points``: points of each worker."""
        self._points = points
        self._workers: set[str] = set()
        self._ring: list[tuple[int, str]] = []

    def add(self, workers: Collection[str]) -> None:
        """Add workers. If very many are known by then, the others are forgotten."""
        new = [worker_id for worker_id in workers if worker_id not in self._workers]
        if not new:
            return
        if len(self._workers) + len(new) > max(_REMEMBERED, 2 * len(workers)):
            self.drop(lambda worker_id: worker_id not in workers)
        self._workers.update(new)
        for worker_id in new:
            self._ring += ((point, worker_id) for point in _points_of(worker_id, self._points))
        self._ring.sort()

    def drop(self, is_gone: Callable[[str], bool]) -> None:
        """Drop workers that do not come back."""
        gone = {worker_id for worker_id in self._workers if is_gone(worker_id)}
        if gone:
            self._workers -= gone
            self._ring = [point for point in self._ring if point[1] not in gone]

    def walk(self, key: str) -> Iterator[str]:
        """The worker of each point, once around the ring from the key's point."""
        start = bisect.bisect(self._ring, (_point(key), ""))
        for number in range(start - len(self._ring), start):
            yield self._ring[number][1]


@lru_cache(_REMEMBERED)
def _points_of(worker_id: str, count: int) -> tuple[int, ...]:
    return tuple(_point(f"{worker_id}#{number}") for number in range(count))


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
