"""Which workers are too busy for one more request, by configured thresholds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from commutator.config.model import BusyConfig
from commutator.routing.contract import WorkerLoad

__all__ = ["describe_busy", "threshold_hit"]


def threshold_hit(config: BusyConfig, load: WorkerLoad, kv_capacity_blocks: int) -> str | None:
    """The option that makes a worker with this load busy; None if it takes another request.

    ``kv_capacity_blocks`` is its own, or one data-parallel rank's, in blocks of the size in which
    ``load`` counts. A worker with nothing in flight is never busy, so that every request can be
    served some time.
    """
    requests = config.max_active_requests
    if requests is not None and load.active_requests >= requests:
        return "max_active_requests"
    tokens = config.active_prefill_tokens_threshold
    if tokens is not None and load.active_prefill_tokens > tokens:
        return "active_prefill_tokens_threshold"
    part = config.active_decode_blocks_threshold
    if part is None or kv_capacity_blocks == 0:  # not every engine tells its capacity
        return None
    over = load.active_decode_blocks > part * kv_capacity_blocks
    return "active_decode_blocks_threshold" if over else None


def describe_busy(config: BusyConfig, hits: Sequence[str]) -> str:
    """A clause for clients: which thresholds the busy workers, at least one, have hit."""
    parts = [
        f"{count} by {name}={getattr(config, name):g}" for name, count in Counter(hits).items()
    ]
    workers = "1 worker is" if len(hits) == 1 else f"{len(hits)} workers are"
    return f"{workers} busy ({', '.join(parts)})"
