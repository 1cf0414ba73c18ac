"""The slots of a tier against a plain model: no slot ever belongs to two."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.tiers.slot_tier import SlotTable

CAPACITY = 6
KEYS = [bytes([number]) * 32 for number in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=5)


class Slots(RuleBasedStateMachine):
    """What each slot is for, kept in the simplest way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(CAPACITY)
        self.reserved: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.retired: set[int] = set()
        self.pins: Counter[int] = Counter()

    @property
    def used(self) -> set[int]:
        return {*self.reserved, *self.committed, *self.retired}

    @rule(keys=some_keys)
    def reserve(self, keys: list[bytes]) -> None:
        known = {*self.reserved.values(), *self.committed.values()}
        room = CAPACITY - len(self.used)
        slots = self.table.reserve(keys)
        assert len(slots) == len(keys)
        given = [slot for slot in slots if slot is not None]
        assert given == sorted(set(given)), "in order, none twice"
        assert not self.used & set(given)
        assert len(given) == min(room, len(set(keys) - known)), "as many as there is room for"
        for key, slot in zip(keys, slots, strict=True):
            if slot is not None:
                assert key not in known
                self.reserved[slot] = key

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        key = self.reserved.pop(slot)
        self.table.commit([stored(key, slot)])
        self.committed[slot] = key

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        self.table.release([slot])
        del self.reserved[slot]
        self.retire(slot)

    @rule(keys=some_keys)
    def evict(self, keys: list[bytes]) -> None:
        self.table.evict(keys)
        for slot in [slot for slot, key in self.committed.items() if key in keys]:
            del self.committed[slot]
            self.retire(slot)

    def retire(self, slot: int) -> None:
        if self.pins[slot]:
            self.retired.add(slot)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.used)))
        self.table.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.table.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.retired.discard(slot)

    @rule(slot=st.integers(-1, CAPACITY))
    def misuse(self, slot: int) -> None:
        if slot not in self.used:
            with pytest.raises(ValueError, match="free"):
                self.table.pin(slot)
        if not self.pins[slot]:
            with pytest.raises(ValueError, match="not pinned"):
                self.table.unpin(slot)
        if slot not in self.reserved:
            with pytest.raises(ValueError, match="not reserved"):
                self.table.release([slot])
            with pytest.raises(ValueError, match="not reserved"):
                self.table.commit([stored(KEYS[0], slot)])

    @rule()
    def restart(self) -> None:
        """What is committed survives; nothing else does."""
        self.table = SlotTable(CAPACITY, list(self.table.committed()))
        self.reserved.clear()
        self.retired.clear()
        self.pins.clear()

    @invariant()
    def tells_the_truth(self) -> None:
        by_key = {key: slot for slot, key in self.committed.items()}
        for key in KEYS:
            found = self.table.lookup(key)
            assert (found.slot if found else None) == by_key.get(key)
        statistics = self.table.statistics()
        assert statistics.capacity == CAPACITY
        assert statistics.committed == len(self.committed)
        assert statistics.reserved == len(self.reserved)
        assert statistics.pinned == len(+self.pins)


def stored(key: bytes, slot: int) -> StoredBlock:
    return StoredBlock(key=key, slot=slot, size_bytes=1, checksum=0)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("slots", [(0, 0), (CAPACITY,), (-1,)])
def test_blocks_of_a_former_life_must_fit(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"slot|outside"):
        SlotTable(CAPACITY, [stored(KEYS[n], slot) for n, slot in enumerate(slots)])


def test_neighbours_in_a_chain_become_neighbours_again() -> None:
    table = SlotTable(8)
    for _ in range(3):
        slots = table.reserve(KEYS[:8])
        assert slots == list(range(8))
        table.release(slot for slot in slots if slot is not None)
