"""What the service keeps of loads and probes, and what it hands to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from commutator.kv.events import KvEvent
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult

__all__ = ["FinishedLoad", "Load", "Polled", "Probe"]


@frozen
class FinishedLoad:
    """A load that was started is over."""

    load_id: str
    blocks: int
    """So many of its first blocks are on the device and verified; the rest must be computed."""


@define
class Polled:
    """What happened since the last look."""

    loads: list[FinishedLoad] = field(factory=list)
    released: list[int] = field(factory=list)
    """Device blocks that are the engine's again, once for each time that they were handed over."""
    events: list[KvEvent] = field(factory=list)


@define
class Load:
    """A load from its plan to its last result."""

    blocks: tuple[tuple[BlockKey, int], ...]
    """Key and tier of each."""
    device_blocks: Sequence[int] = ()
    results: dict[BlockKey, LoadResult] = field(factory=dict)
    seconds: dict[int, float] = field(factory=dict)
    jobs: int = 0
    cancelled: bool = False


@define
class Probe:
    """A shared tier is being asked on behalf of one load."""

    waiting: int
    deadline_s: float
