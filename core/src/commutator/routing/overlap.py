"""How much of a prompt a worker holds already."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from attrs import frozen

__all__ = ["Overlap", "WorkerRank", "best_rank", "on_device"]


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what has a prefix cache of its own."""

    worker_id: str
    rank: int = 0


@frozen
class Overlap:
    """The longest prefix that is cached without a gap, in blocks, each counted where it is best."""

    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0

    @property
    def blocks(self) -> int:
        """The length of the prefix, whatever the tiers."""
        return self.device + self.host + self.disk + self.external


@lru_cache(65_536)
def on_device(blocks: int) -> Overlap:
    """An overlap on the device alone: what most are, so it is made once for each length."""
    return Overlap(blocks)


def best_rank(matches: Mapping[WorkerRank, Overlap], worker_id: str) -> tuple[int, Overlap]:
    """The rank of the worker that holds most, and what it holds; rank 0 and nothing if none does.

    Of equally long prefixes the one with more on the device counts as more, and so on down.
    """
    best = (0, Overlap())
    for (owner, rank), overlap in matches.items():
        if owner == worker_id and _order(overlap) > _order(best[1]):
            best = (rank, overlap)
    return best


def _order(overlap: Overlap) -> tuple[int, int, int, int]:
    return overlap.blocks, overlap.device, overlap.host, overlap.disk
