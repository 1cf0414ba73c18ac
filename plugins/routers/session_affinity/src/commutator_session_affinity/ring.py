"""A consistent-hash ring of workers that stays as it is while some of them are left out."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from hashlib import blake2b

__all__ = ["HashRing"]

_REMEMBERED = 1024


class HashRing:
    """The places of every worker that was seen, until it is gone.

    Who is left out for a moment keeps its places, and a walk passes over them: that gives the order
    of a ring without it, and nothing is made anew when it is back.
    """

    def __init__(self, points: int) -> None:
        """``points``: places of each worker."""
        self._points = points
        self._workers: set[str] = set()
        self._ring: list[tuple[int, str]] = []

    def add(self, workers: Collection[str]) -> None:
        """These are there. When very many were seen, none of which went with news, only these."""
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
        """Workers that do not come back."""
        gone = {worker_id for worker_id in self._workers if is_gone(worker_id)}
        if gone:
            self._workers -= gone
            self._ring = [place for place in self._ring if place[1] not in gone]

    def walk(self, key: str) -> Iterator[str]:
        """The workers from the key's point on, once around; each as often as it has places."""
        start = bisect.bisect(self._ring, (_point(key), ""))
        for number in range(start - len(self._ring), start):
            yield self._ring[number][1]


@lru_cache(_REMEMBERED)
def _points_of(worker_id: str, count: int) -> tuple[int, ...]:
    return tuple(_point(f"{worker_id}#{number}") for number in range(count))


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
