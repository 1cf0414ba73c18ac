"""What happened to blocks: one counter for each tier, edge and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import Factory, define, frozen

__all__ = ["EdgeCounts", "EdgeStatistics", "KvStatistics", "TierCounts", "TierState", "count"]

_MOST_REASONS = 32
_OTHER = "other"


def count(counter: Counter[str], reason: str, blocks: int = 1) -> None:
    """Add to a reason's counter; the number of different reasons is bounded."""
    if blocks:
        known = reason in counter or len(counter) < _MOST_REASONS
        counter[reason if known else _OTHER] += blocks


@define
class TierCounts:
    """Since start, in blocks."""

    loads: Counter[str] = Factory(Counter)
    """By outcome: "loaded", "missing", "corrupt", "failed", "not run"."""
    not_loaded: Counter[str] = Factory(Counter)
    """Found here, but not asked for, by reason."""
    removed: Counter[str] = Factory(Counter)
    """By reason: "evicted", "moved down", "corrupt", "lost", ..."""
    prefetched: Counter[str] = Factory(Counter)
    """"brought" from a slower tier before they were asked for; of these "used" since, or gone
    "unused"."""


@define
class EdgeCounts:
    """From one source to one tier since start, in blocks."""

    stored: int = 0
    not_admitted: Counter[str] = Factory(Counter)
    failed: Counter[str] = Factory(Counter)


@frozen(kw_only=True)
class TierState:
    """One tier now, and its counters, in blocks."""

    name: str
    medium: str
    up: bool
    capacity: int
    published: int
    staged: int
    """Being stored."""
    leaving: int
    """Out of the index, but a load still reads them."""
    waiting: int
    """To be stored once there is room."""
    loading: int
    """Pinned by loads or moves."""
    retained: int
    """Pinned by requests."""
    pins_refused: int
    loads: Mapping[str, int]
    not_loaded: Mapping[str, int]
    removed: Mapping[str, int]
    prefetched: Mapping[str, int] = Factory(dict)
    latency_s: float | None
    """Of a load, as measured; None before the first."""
    block_s: float | None
    """Additional time for each block of a load."""


@frozen(kw_only=True)
class EdgeStatistics:
    """``source`` is a tier's name or "device"."""

    source: str
    target: str
    stored: int
    not_admitted: Mapping[str, int]
    failed: Mapping[str, int]


@frozen(kw_only=True)
class KvStatistics:
    """Everything there is to count."""

    tiers: tuple[TierState, ...]
    edges: tuple[EdgeStatistics, ...]
    blocks: int
    """Different blocks known."""
    held_on_device: int
    """Blocks of the device that must not be reused yet."""
    loads_running: int
    stores_running: int

    def edge(self, source: str, target: str) -> EdgeStatistics:
        """The counters of one edge; zeroes when nothing ever went that way."""
        return next(
            iter(self._edges(source, target)),
            EdgeStatistics(source=source, target=target, stored=0, not_admitted={}, failed={}),
        )

    def _edges(self, source: str, target: str) -> Iterable[EdgeStatistics]:
        return [edge for edge in self.edges if (edge.source, edge.target) == (source, target)]
