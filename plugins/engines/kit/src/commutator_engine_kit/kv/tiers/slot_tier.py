"""A base class for storage tiers: it manages slots, and leaves bytes and durability to a subclass.

A subclass returns from ``open_slots`` the number of slots and the blocks that an earlier process
stored in them, and from ``place`` the position of a slot's bytes. A durable tier also overrides
``remember`` and ``forget``. They are called before the table in memory changes, and only if it
does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, ValuesView

from attrs import frozen

from commutator.contract.block import BlockKey
from commutator.contract.tier import (
    Region,
    Slot,
    SlotGeometry,
    StorageTier,
    StoredBlock,
    TierStatistics,
)
from commutator.errors import TierError


@frozen
class OpenedSlots:
    """The result of ``open_slots``."""

    capacity: int
    committed: Sequence[StoredBlock] = ()
    damaged: int = 0
    """Blocks that an earlier process committed and that are missing or damaged."""


class SlotTable:
    """Slots 0 to ``capacity - 1``. No method's time depends on the number of slots.

    Misuse, such as committing a slot that is not reserved, raises ValueError and changes nothing.
    """

    def __init__(self, capacity: int, committed: Sequence[StoredBlock] = ()) -> None:
        """``committed``: an earlier process's blocks. ValueError when two share a slot or key."""
        self._capacity = capacity
        self._committed = {stored.key: stored for stored in committed}
        self._committed_slots = used = {stored.slot for stored in committed}
        self._reserved: dict[Slot, BlockKey] = {}
        self._reserved_keys: set[BlockKey] = set()
        self._retired: set[Slot] = set()
        self._pins: Counter[Slot] = Counter()
        if used and not 0 <= min(used) <= max(used) < capacity:
            raise ValueError(f"a block is outside the {capacity} slots")
        if not len(committed) == len(used) == len(self._committed):
            raise ValueError("two committed blocks have the same key or slot")
        # Slots from here on were never used; the list of free slots has only lower ones.
        self._fresh = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._fresh - 1, -1, -1) if slot not in used]

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """A slot for each key, ascending; None where the key has one or no slot is free."""
        wanted = {
            key: None
            for key in keys
            if key not in self._committed and key not in self._reserved_keys
        }
        # In order, so that neighbours in a chain are adjacent and move as one piece.
        slots = sorted(self._take(len(wanted)))
        given: dict[BlockKey, Slot] = dict(zip(wanted, slots, strict=False))
        self._reserved |= {slot: key for key, slot in given.items()}
        self._reserved_keys |= given.keys()
        return [given.pop(key, None) for key in keys]

    def commit(
        self,
        blocks: Sequence[StoredBlock],
        remember: Callable[[Sequence[StoredBlock]], None] = lambda _: None,
    ) -> None:
        """Turn reserved slots into committed blocks.

        ``remember`` is called after all checks and before any change; if it raises an exception,
        the slots stay reserved.
        """
        self._check_reserved(blocks)
        remember(blocks)
        for stored in blocks:
            self._drop_reservation(stored.slot)
        self._committed.update({stored.key: stored for stored in blocks})
        self._committed_slots.update(stored.slot for stored in blocks)

    def lookup(self, key: BlockKey) -> StoredBlock | None:
        return self._committed.get(key)

    def pin(self, slot: Slot) -> None:
        """Prevent reuse of the slot until ``unpin``. Pins are counted."""
        if not self._in_use(slot):
            raise ValueError(f"slot {slot} is free: there is nothing in it to pin")
        self._pins[slot] += 1

    def unpin(self, slot: Slot) -> None:
        if slot not in self._pins:
            raise ValueError(f"slot {slot} is not pinned")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._retired:
                self._retired.remove(slot)
                self._free.append(slot)

    def is_pinned(self, slot: Slot) -> bool:
        return slot in self._pins

    def release(self, slots: Iterable[Slot]) -> None:
        """Release reserved slots; each is free once it has no pins."""
        slots = set(slots)
        if unreserved := slots - self._reserved.keys():
            raise ValueError(f"slot {min(unreserved)} is not reserved")
        for slot in sorted(slots, reverse=True):
            self._drop_reservation(slot)
            self._retire(slot)

    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Remove committed blocks; ignores unknown keys."""
        gone = (self._committed.pop(key, None) for key in keys)
        for slot in sorted((stored.slot for stored in gone if stored), reverse=True):
            self._committed_slots.remove(slot)
            self._retire(slot)

    def committed(self) -> ValuesView[StoredBlock]:
        return self._committed.values()

    def statistics(self, damaged: int = 0) -> TierStatistics:
        return TierStatistics(
            capacity=self._capacity,
            committed=len(self._committed),
            reserved=len(self._reserved),
            pinned=len(self._pins),
            damaged=damaged,
        )

    def _check_reserved(self, blocks: Sequence[StoredBlock]) -> None:
        """Raise ValueError unless each block's slot is reserved for its key, and listed once."""
        seen: set[Slot] = set()
        for stored in blocks:
            if self._reserved.get(stored.slot) != stored.key or stored.slot in seen:
                raise ValueError(f"slot {stored.slot} is not reserved for {stored.key.hex()}")
            seen.add(stored.slot)

    def _take(self, count: int) -> list[Slot]:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first = self._fresh
        self._fresh = min(self._capacity, first + count - len(reused))
        return reused + list(range(first, self._fresh))

    def _drop_reservation(self, slot: Slot) -> None:
        self._reserved_keys.remove(self._reserved.pop(slot))

    def _retire(self, slot: Slot) -> None:
        if slot in self._pins:
            self._retired.add(slot)
        else:
            self._free.append(slot)

    def _in_use(self, slot: Slot) -> bool:
        return slot in self._committed_slots or slot in self._reserved or slot in self._retired


class SlotTier(StorageTier):
    """A tier whose slots are managed by a ``SlotTable``."""

    _table: SlotTable | None = None
    _damaged = 0

    @abstractmethod
    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        """Open memory, files or a connection. Raises TierError with advice."""

    def remember(self, blocks: Sequence[StoredBlock]) -> None:
        """Make written blocks durable. Raises TierError: then none of them is durable."""

    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        """Undo ``remember``. Called before the slots can be reused.

        Raises TierError: then the blocks stay committed.
        """

    def close_slots(self) -> None:
        """Release what ``open_slots`` opened. Called once, and only if it succeeded."""

    def regions(self) -> Sequence[Region]:
        return ()

    def open(self, geometry: SlotGeometry) -> Sequence[StoredBlock]:
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
        """The table of slots. Raises TierError while the tier is not open."""
        if self._table is None:
            raise TierError(f"the tier {self.medium} is not open; call open() first")
        return self._table

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return self.table.reserve(keys)

    def commit(self, blocks: Iterable[StoredBlock]) -> None:
        if blocks := list(blocks):
            self.table.commit(blocks, self.remember)

    def lookup(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
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

    def committed(self) -> Iterable[StoredBlock]:
        return self.table.committed()

    def statistics(self) -> TierStatistics:
        return self.table.statistics(self._damaged)
