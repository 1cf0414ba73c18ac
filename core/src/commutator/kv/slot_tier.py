"""A storage tier but for where its bytes lie and how it remembers them: most tiers build on this.

A subclass says in ``open_slots`` how many slots there are and which blocks a former life left in
them, and in ``place`` where a slot's bytes are. One that is durable also overrides ``remember`` and
``forget``; they are called before the bookkeeping in memory changes, and not at all when nothing
would.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from attrs import frozen

from commutator.errors import TierError
from commutator.kv.keys import BlockKey
from commutator.kv.slots import SlotTable
from commutator.kv.tier import Slot, SlotGeometry, StorageTier, Stored, TierStatistics
from commutator.transfer.spans import Region

__all__ = ["OpenedSlots", "SlotTier"]


@frozen
class OpenedSlots:
    """What ``open_slots`` found."""

    capacity: int
    committed: Sequence[Stored] = ()
    damaged: int = 0
    """Blocks that a former life committed and that are there no more, or not intact."""


class SlotTier(StorageTier):
    """Keeps the books of a tier's slots in a ``SlotTable``."""

    _table: SlotTable | None = None
    _damaged = 0

    @abstractmethod
    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        """Get memory, files or a connection. Raises TierError, saying what to do."""

    def remember(self, blocks: Sequence[Stored]) -> None:
        """Make blocks durable whose bytes are written. Raises TierError: then none of them is."""

    def forget(self, blocks: Sequence[Stored]) -> None:
        """The opposite of ``remember``, before their slots can be used again.

        Raises TierError: then the blocks stay committed.
        """

    def close_slots(self) -> None:
        """Let go of what ``open_slots`` got. Called once, and only if that succeeded."""

    def regions(self) -> Sequence[Region]:
        return ()

    def open(self, geometry: SlotGeometry) -> Sequence[Stored]:
        if self._table is not None:
            raise TierError(f"the tier {self.medium} is open already; close it first")
        opened = self.open_slots(geometry)
        self._table, self._damaged = SlotTable(opened.capacity, opened.committed), opened.damaged
        return opened.committed

    def close(self) -> None:
        if self._table is not None:
            self._table = None
            self.close_slots()

    @property
    def table(self) -> SlotTable:
        """The books. Raises TierError while the tier is not open."""
        if self._table is None:
            raise TierError(f"the tier {self.medium} is not open; call open() first")
        return self._table

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return self.table.reserve(keys)

    def commit(self, blocks: Iterable[Stored]) -> None:
        if blocks := list(blocks):
            self.table.commit(blocks, self.remember)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        return [self.table.lookup(key) for key in keys]

    def pin(self, slot: Slot) -> None:
        self.table.pin(slot)

    def unpin(self, slot: Slot) -> None:
        self.table.unpin(slot)

    def release(self, slots: Iterable[Slot]) -> None:
        self.table.release(slots)

    def evict(self, keys: Iterable[BlockKey]) -> None:
        found = [stored for stored in map(self.table.lookup, dict.fromkeys(keys)) if stored]
        if found:
            self.forget(found)
            self.table.evict(stored.key for stored in found)

    def committed(self) -> Iterable[Stored]:
        return self.table.committed()

    def statistics(self) -> TierStatistics:
        return self.table.statistics(self._damaged)
