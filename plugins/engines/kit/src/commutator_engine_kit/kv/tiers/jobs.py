"""Stores, from the engine's memory or from another tier, as jobs of the tiers' threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from attrs import define, field

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import Memory, Span, StoredBlock
from commutator_engine_kit.kv.block_manager.actions import JobUrgency, LoadResult
from commutator_engine_kit.kv.tiers.block_io import IoContext
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.staged_io import Staging
from commutator_engine_kit.kv.tiers.thread import Job, TierThread

__all__ = ["PART_BLOCKS", "Stores", "TierMove", "part_blocks", "store_job"]

PART_BLOCKS = 16
"""Blocks in a part of a job. A more urgent job may run between two parts."""

_MOST_BLOCKS = 256
_STORE_BYTES = {Memory.OBJ: 32 << 20}
_OTHER_STORE_BYTES = 64 << 20
"""About 10 ms in memory and 30 ms on a disk: long compared with the work between two parts. Objects
take far longer, so their parts are smaller."""

Stores = Callable[[list[StoredBlock], dict[BlockKey, str]], None]
"""Called exactly once with the stored blocks, and with the reasons for the others."""


def part_blocks(block_bytes: int, memory: Memory) -> int:
    """Blocks in a part of a store into a tier: more where blocks are small."""
    part_bytes = _STORE_BYTES.get(memory, _OTHER_STORE_BYTES)
    return min(_MOST_BLOCKS, max(PART_BLOCKS, part_bytes // block_bytes))


def store_job(
    offers: Sequence[BlockDescriptor],
    sources: Sequence[Span],
    *,
    from_engine: bool,
    done: Stores,
) -> Job:
    """Store blocks whose bytes are in memory, in parts."""

    def run(worker: TierExecutor | None) -> Generator[None, None, None]:
        stored: list[StoredBlock] = []
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
                context = IoContext(time.monotonic() + worker.setup.config.store_timeout_s)
                outcome = worker.store(
                    offers[start:end], sources[start:end], context, from_engine=from_engine
                )
                stored += outcome.stored
                failed |= outcome.failed
        finally:
            # Also when the thread stops between two parts.
            done(stored, failed)

    return run


@define(eq=False, kw_only=True)
class TierMove:
    """Moves blocks between tiers in parts: reads on the source's thread, stores on the target's.

    ``done`` is called exactly once, on either thread.
    """

    _offers: list[BlockDescriptor]
    """The blocks that are not read yet."""
    _source: TierThread
    _target: TierThread
    _scratch: Staging
    _urgency: JobUrgency
    _done: Stores
    _stored: list[StoredBlock] = field(init=False, factory=list)
    _failed: dict[BlockKey, str] = field(init=False, factory=dict)

    def start(self) -> None:
        """Read the next blocks, or call ``done`` when there are none."""
        if self._offers:
            self._source.submit(self._urgency, self._read)
        else:
            self._done(self._stored, self._failed)

    def _read(self, worker: TierExecutor | None) -> Generator[None, None, None]:
        if worker is None:
            self._failed |= {offer.key: "tier is down" for offer in self._offers}
            self._offers.clear()
            self.start()
            yield from ()
            return
        slots = self._scratch.take(min(PART_BLOCKS, len(self._offers)))
        if not slots:
            self._scratch.take_later(self.start)
            yield from ()
            return
        batch = self._offers[: len(slots)]
        del self._offers[: len(slots)]
        spans = [self._scratch.arena.span(slot) for slot in slots]
        users = dict.fromkeys(slots, 2)  # the read, and the store after it

        def done_with(slot: int) -> None:
            users[slot] -= 1
            if not users[slot]:
                self._scratch.give_back([slot])

        results = [LoadResult.FAILED] * len(batch)
        try:
            results = worker.load(
                [offer.key for offer in batch],
                spans,
                IoContext(time.monotonic() + worker.setup.config.load_timeout_s),
                to_engine=False,
                on_released=lambda position: done_with(slots[position]),
            )
        finally:
            self._write(batch, results, slots, done_with)
        yield from ()

    def _write(
        self,
        batch: Sequence[BlockDescriptor],
        results: Sequence[LoadResult],
        slots: Sequence[int],
        done_with: Callable[[int], None],
    ) -> None:
        """Store the blocks that were read, then continue with the next ones."""
        good: list[int] = []
        for position, (offer, result) in enumerate(zip(batch, results, strict=True)):
            if result is LoadResult.LOADED:
                good.append(position)
            else:
                self._failed[offer.key] = f"{result.value} at its source"
                done_with(slots[position])

        def written(stored: list[StoredBlock], failed: dict[BlockKey, str]) -> None:
            self._stored += stored
            self._failed |= failed
            for position in good:
                done_with(slots[position])
            self.start()

        self._target.submit(
            self._urgency,
            store_job(
                [batch[position] for position in good],
                [self._scratch.arena.span(slots[position]) for position in good],
                from_engine=False,
                done=written,
            ),
        )
