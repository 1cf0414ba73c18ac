"""Reads every block of a tier again and checks it, on the tier's own thread, after all else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator

from attrs import define, field

from commutator.kv.block_io import IoContext
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.service_jobs import PART_BLOCKS
from commutator.kv.tier_worker import TierWorker

__all__ = ["Verification"]

_NO_ROOM_PAUSE_S = 0.002


@define
class Verification:
    """The check of one tier: a job for its thread, and what came out of it."""

    timeout_s: float
    """For a part of ``PART_BLOCKS`` blocks."""
    blocks: int = 0
    size_bytes: int = 0
    """Of the blocks that were read."""
    results: Counter[LoadResult] = field(factory=Counter)
    corrupt: list[BlockKey] = field(factory=list)
    seconds: float = 0.0
    problem: str | None = None
    """Why it ended early, if it did."""
    over: threading.Event = field(factory=threading.Event)

    def run(self, worker: TierWorker | None) -> Generator[None, None, None]:
        """The job."""
        started_s = time.monotonic()
        self.problem = "the tier is down"
        try:
            if worker is None:
                return
            committed = list(worker.setup.tier.committed())
            self.blocks = len(committed)
            sizes = {stored.key: stored.size_bytes for stored in committed}
            keys = list(sizes)
            at = 0
            self.problem = "the worker was stopped, or the tier was closed"
            while at < len(keys) and worker.is_open:
                context = IoContext(time.monotonic() + self.timeout_s)
                found = worker.verify(keys[at : at + PART_BLOCKS], context)
                if not found:
                    time.sleep(_NO_ROOM_PAUSE_S)
                for key, result in found.items():
                    self.results[result] += 1
                    if result is LoadResult.CORRUPT:
                        self.corrupt.append(key)
                    if result in (LoadResult.LOADED, LoadResult.CORRUPT):
                        self.size_bytes += sizes[key]
                at += len(found)
                yield
            self.problem = None if at == len(keys) else "the tier was closed meanwhile"
        finally:
            self.seconds = time.monotonic() - started_s
            self.over.set()
