"""Who has which slot of a tier: pure bookkeeping, the same for every tier.

A slot is free, reserved for one key, committed with one block, or retired: its block is evicted or
given up, but a reader still pins it. At most one slot is reserved or committed for a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, ValuesView

from commutator.kv.keys import BlockKey
from commutator.kv.tier import Slot, Stored, TierStatistics

__all__ = ["SlotTable"]


class SlotTable:
    """Slots 0 to ``capacity - 1``. Every method takes the same time however many there are.

    Misuse, such as committing a slot that is not reserved, raises ValueError and changes nothing.
    """

    def __init__(self, capacity: int, committed: Sequence[Stored] = ()) -> None:
        """``committed`` are the blocks of a former life; ValueError when two share slot or key."""
        self._capacity = capacity
        self._committed = {stored.key: stored for stored in committed}
        self._committed_slots = used = {stored.slot for stored in committed}
        self._reserved: dict[Slot, BlockKey] = {}
        self._reserved_keys: set[BlockKey] = set()
        self._retired: set[Slot] = set()
        self._pins: Counter[Slot] = Counter()
        if used and not 0 <= min(used) <= max(used) < capacity:
            raise ValueError(f"a block lies outside the {capacity} slots")
        if not len(committed) == len(used) == len(self._committed):
            raise ValueError("two committed blocks have the same key or slot")
        # Slots from here on were never used; the list of free ones stays as short as it can be.
        self._fresh = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._fresh - 1, -1, -1) if slot not in used]

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """A slot for each key, in rising order; None where it is there already or all are taken."""
        wanted = {
            key: None
            for key in keys
            if key not in self._committed and key not in self._reserved_keys
        }
        # In order, so that neighbours in a chain lie side by side and move as one piece.
        slots = sorted(self._take(len(wanted)))
        given: dict[BlockKey, Slot] = dict(zip(wanted, slots, strict=False))
        self._reserved |= {slot: key for key, slot in given.items()}
        self._reserved_keys |= given.keys()
        return [given.pop(key, None) for key in keys]

    def commit(
        self,
        blocks: Sequence[Stored],
        remember: Callable[[Sequence[Stored]], None] = lambda _: None,
    ) -> None:
        """Reserved slots hold valid blocks from now on.

        ``remember`` is called before anything changes, but once it is sure that they can be
        committed; what it raises keeps them reserved.
        """
        self._check_reserved(blocks)
        remember(blocks)
        for stored in blocks:
            self._drop_reservation(stored.slot)
        self._committed.update({stored.key: stored for stored in blocks})
        self._committed_slots.update(stored.slot for stored in blocks)

    def lookup(self, key: BlockKey) -> Stored | None:
        return self._committed.get(key)

    def pin(self, slot: Slot) -> None:
        """Keep the slot from being used for anything else until ``unpin``. Counted."""
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
        """Give reserved slots up; each is free once nothing pins it."""
        slots = set(slots)
        if strangers := slots - self._reserved.keys():
            raise ValueError(f"slot {min(strangers)} is not reserved")
        for slot in sorted(slots, reverse=True):
            self._drop_reservation(slot)
            self._retire(slot)

    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Forget committed blocks; unknown keys are passed over."""
        gone = (self._committed.pop(key, None) for key in keys)
        for slot in sorted((stored.slot for stored in gone if stored), reverse=True):
            self._committed_slots.remove(slot)
            self._retire(slot)

    def committed(self) -> ValuesView[Stored]:
        return self._committed.values()

    def statistics(self, damaged: int = 0) -> TierStatistics:
        return TierStatistics(
            capacity=self._capacity,
            committed=len(self._committed),
            reserved=len(self._reserved),
            pinned=len(self._pins),
            damaged=damaged,
        )

    def _check_reserved(self, blocks: Sequence[Stored]) -> None:
        """Raise ValueError unless each block's slot is reserved for its key, and named once."""
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
