"""Wraps a storage tier, or the I/O of one, so that it fails by seed and by chance as media do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from commutator.errors import TierError
from commutator.kv.arena import bytes_at
from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.export_options import ExportOptions
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.tier import (
    Peer,
    Slot,
    SlotGeometry,
    StorageTier,
    Stored,
    TierStatistics,
)
from commutator.transfer.spans import Memory, Region, Span

__all__ = ["FaultyIo", "FaultyTier", "IoFaults", "TierFaults", "damage"]

_POLL_S = 0.005


@frozen(kw_only=True)
class IoFaults:
    """Chances from 0 to 1, each drawn anew for every job."""

    fail: float = 0.0
    """Not one block gets through."""
    short: float = 0.0
    """Only the first blocks get through."""
    slow: float = 0.0
    hang: float = 0.0
    """Nothing happens until the job's deadline, or until nobody wants it any more."""
    slow_s: float = 0.02


class FaultyIo(BlockIo):
    """``TierSetup.wrap_io`` puts it around the moves of a tier."""

    def __init__(self, inner: BlockIo, faults: IoFaults, rng: random.Random) -> None:
        self._inner = inner
        self.faults = faults
        self._rng = rng

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        through = self._through(len(blocks), context)
        results = self._inner.store(blocks[:through], context) if through else []
        return results + [Unstored("injected")] * (len(blocks) - through)

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        through = self._through(len(blocks), context)
        results = self._inner.load(blocks[:through], context) if through else []
        return results + [LoadResult.FAILED] * (len(blocks) - through)

    def _through(self, blocks: int, context: IoContext) -> int:
        faults, rng = self.faults, self._rng
        if rng.random() < faults.hang:
            while not context.over:
                time.sleep(_POLL_S)
            return 0
        if rng.random() < faults.slow:
            time.sleep(min(faults.slow_s, context.remaining_s))
        if rng.random() < faults.fail:
            return 0
        return rng.randint(0, blocks) if rng.random() < faults.short else blocks


@frozen(kw_only=True)
class TierFaults:
    """Chances from 0 to 1, each drawn anew for every call, or for every block."""

    open: float = 0.0
    no_slot: float = 0.0
    """For each block: there is no free slot."""
    commit: float = 0.0
    evict: float = 0.0
    probe: float = 0.0
    corrupt: float = 0.0
    """For each block that is committed: one of its bytes on the medium changes."""
    cut: float = 0.0
    """For each block that is committed: what it ends with never reached the medium."""


class FaultyTier(StorageTier):
    """``inner`` with faults; only tiers in host memory or in files can be corrupted."""

    def __init__(self, inner: StorageTier, faults: TierFaults, rng: random.Random) -> None:
        self._inner = inner
        self.faults = faults
        self._rng = rng
        self.damaged: set[BlockKey] = set()
        """Blocks whose bytes were spoiled, as far as they are still there."""
        self._take_over()

    def _take_over(self) -> None:
        self.medium, self.memory = self._inner.medium, self._inner.memory
        self.framed, self.shared = self._inner.framed, self._inner.shared
        self.writable, self.asks_peers = self._inner.writable, self._inner.asks_peers
        self.backend, self.alignment_bytes = self._inner.backend, self._inner.alignment_bytes

    def _hit(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _maybe_fail(self, chance: float, what: str) -> None:
        if self._hit(chance):
            raise TierError(f"injected: {what}")

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        self._inner.use_peers(find)

    @property
    def export_options(self) -> ExportOptions | None:
        return self._inner.export_options

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        return self._inner.backend_parameters

    def open(self, geometry: SlotGeometry) -> Sequence[Stored]:
        self._maybe_fail(self.faults.open, "cannot be opened")
        found = self._inner.open(geometry)
        self._take_over()
        return found

    def regions(self) -> Sequence[Region]:
        return self._inner.regions()

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        wanted = [key for key in keys if not self._hit(self.faults.no_slot)]
        slots = dict(zip(wanted, self._inner.reserve(wanted), strict=True))
        return [slots.get(key) for key in keys]

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        return self._inner.place(slot, size_bytes)

    def commit(self, blocks: Iterable[Stored]) -> None:
        blocks = list(blocks)
        self._maybe_fail(self.faults.commit, "cannot write its records")
        for stored in blocks:
            self.damaged.discard(stored.key)
            where = self._rng.randrange(stored.size_bytes)
            if self._hit(self.faults.corrupt):
                damage(self._inner, stored, where)
                self.damaged.add(stored.key)
            elif self._hit(self.faults.cut) and damage(self._inner, stored, where, all_behind=True):
                self.damaged.add(stored.key)
        self._inner.commit(blocks)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        return self._inner.lookup(keys)

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        self._maybe_fail(self.faults.probe, "cannot be asked")
        return self._inner.probe(keys)

    def peer(self, slot: Slot) -> Peer | None:
        return self._inner.peer(slot)

    def pin(self, slot: Slot) -> None:
        self._inner.pin(slot)

    def unpin(self, slot: Slot) -> None:
        self._inner.unpin(slot)

    def release(self, slots: Iterable[Slot]) -> None:
        self._inner.release(slots)

    def evict(self, keys: Iterable[BlockKey]) -> None:
        keys = list(keys)
        self._maybe_fail(self.faults.evict, "cannot write its records")
        self._inner.evict(keys)
        self.damaged.difference_update(keys)

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        keys = list(keys)
        self._maybe_fail(self.faults.evict, "cannot write its records")
        self._inner.make_room(keys)
        if not self.shared:
            self.damaged.difference_update(keys)

    def committed(self) -> Iterable[Stored]:
        return self._inner.committed()

    def statistics(self) -> TierStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()


def damage(tier: StorageTier, stored: Stored, where: int, *, all_behind: bool = False) -> bool:
    """Change a byte of a block on its medium, or all from there on to 0; whether it is another.

    Raises ValueError for a tier whose bytes are neither in this process's memory nor in files.
    """
    span, region = tier.place(stored.slot, stored.size_bytes)
    if tier.memory is Memory.DRAM and tier.peer(stored.slot) is None:
        return _spoil(bytes_at(span), where, all_behind=all_behind)
    if tier.memory is not Memory.FILE:
        raise ValueError(f"the bytes of {tier.medium} cannot be reached from here")
    name = "" if region is None else region.name.partition(":")[2]
    path = Path(name or f"/proc/self/fd/{span.device}")
    with path.open("rb+", buffering=0) as file:
        file.seek(span.address)
        data = memoryview(bytearray(file.read(stored.size_bytes)))
        changed = _spoil(data, where, all_behind=all_behind)
        file.seek(span.address)
        file.write(data)
    return changed


def _spoil(data: memoryview, where: int, *, all_behind: bool) -> bool:
    if not all_behind:
        data[where] ^= 1 << where % 8
        return True
    changed = any(data[where:])
    data[where:] = bytes(len(data) - where)
    return changed
