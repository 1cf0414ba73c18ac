"""The jobs that the service gives to a tier's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from commutator.kv.block_io import IoContext
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.offer import Offer
from commutator.kv.tier import Stored
from commutator.kv.tier_thread import Job
from commutator.kv.tier_worker import TierWorker
from commutator.transfer import Memory, Span

__all__ = [
    "PART_BLOCKS",
    "Stores",
    "free_job",
    "load_job",
    "part_blocks",
    "probe_job",
    "store_job",
]

PART_BLOCKS = 16
"""After so many blocks a more urgent job may go first."""
_MOST_BLOCKS = 256
_STORE_BYTES = {Memory.OBJ: 32 << 20}
_OTHER_STORE_BYTES = 64 << 20
"""Some 10 ms in memory, 30 on a disk: what is done between two parts is little beside that. To send
objects takes far longer, and a more urgent job should not wait for so many."""

Stores = Callable[[list[Stored], dict[BlockKey, str]], None]
"""Told what was stored, and why the rest was not; exactly once."""


def part_blocks(block_bytes: int, memory: Memory) -> int:
    """The same for stores into a tier, where more of small blocks take no longer."""
    part_bytes = _STORE_BYTES.get(memory, _OTHER_STORE_BYTES)
    return min(_MOST_BLOCKS, max(PART_BLOCKS, part_bytes // block_bytes))


def load_job(
    keys: Sequence[BlockKey],
    spans: Sequence[Span],
    *,
    timeout_s: float,
    begin: Callable[[], bool],
    cancelled: Callable[[], bool],
    on_let_go: Callable[[int], None],
    done: Callable[[list[LoadResult], float], None],
) -> Job:
    """Load blocks into the engine's memory; ``done`` gets the results and the seconds it took.

    Nothing happens at all, and ``done`` is not called, when ``begin`` says that it is too late.
    """

    def run(worker: TierWorker | None) -> Generator[None, None, None]:
        if not begin():
            return
        started_s = time.monotonic()
        results = [LoadResult.FAILED] * len(keys)
        try:
            if worker is None:
                for position in range(len(keys)):
                    on_let_go(position)
            else:
                context = IoContext(started_s + timeout_s, cancelled)
                results = worker.load(keys, spans, context, to_engine=True, on_let_go=on_let_go)
        finally:
            done(results, time.monotonic() - started_s)
        yield from ()

    return run


def store_job(
    offers: Sequence[Offer],
    sources: Sequence[Span],
    *,
    timeout_s: float,
    from_engine: bool,
    done: Stores,
) -> Job:
    """Store blocks whose bytes are in memory, some at a time."""

    def run(worker: TierWorker | None) -> Generator[None, None, None]:
        stored: list[Stored] = []
        failed: dict[BlockKey, str] = {}
        try:
            step = PART_BLOCKS
            if sources and worker is not None:
                step = part_blocks(sources[0].size_bytes, worker.setup.tier.memory)
            for start in range(0, len(offers), step):
                end = start + step
                if worker is None or not worker.is_open:
                    failed |= {offer.key: "tier is down" for offer in offers[start:end]}
                    continue
                if start:
                    yield
                context = IoContext(time.monotonic() + timeout_s)
                outcome = worker.store(
                    offers[start:end], sources[start:end], context, from_engine=from_engine
                )
                stored += outcome.stored
                failed |= outcome.failed
        finally:
            # Whoever waits is told, also when the thread ends in between.
            done(stored, failed)

    return run


def free_job(keys: Sequence[BlockKey], *, makes_room: bool) -> Job:
    """Forget blocks; with ``makes_room`` others that share them keep them."""

    def run(worker: TierWorker | None) -> Generator[None, None, None]:
        if worker is not None:
            worker.free(keys, makes_room=makes_room)
        yield from ()

    return run


def probe_job(keys: Sequence[BlockKey], done: Callable[[Sequence[Stored]], None]) -> Job:
    """Ask a shared medium for a chain of blocks."""

    def run(worker: TierWorker | None) -> Generator[None, None, None]:
        found: Sequence[Stored] = ()
        try:
            found = () if worker is None else worker.probe(keys)
        finally:
            done(found)
        yield from ()

    return run
