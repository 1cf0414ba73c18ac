"""What a worker counts of its hand-overs, both sides."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ExportStatistics", "HandoverStatistics", "PullStatistics"]


@frozen
class ExportStatistics:
    """What the prefill side has handed over."""

    active: int = 0
    """Hand-overs that hold blocks now, or will."""
    held_blocks: int = 0
    released: int = 0
    """Ended by the decode side."""
    failed: int = 0
    lapsed: int = 0
    """Ended because nobody asked for so long."""


@frozen
class PullStatistics:
    """What the decode side has fetched."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    dropped: int = 0
    """Aborted, or found not to be needed."""
    pulled_bytes: int = 0
    """Read and verified."""
    nixl_bytes: int = 0
    """What NIXL's own telemetry says it has read; 0 where no bytes are moved, as in ``sim``."""
    pull_s: float = 0.0
    """Time that requests spent reading, waits for the prefill worker included."""


@frozen
class HandoverStatistics:
    """The answer to the question "statistics"."""

    exports: ExportStatistics = ExportStatistics()
    pulls: PullStatistics = PullStatistics()
