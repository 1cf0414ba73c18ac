"""What peers have lent us, in memory. Pure: the time is passed in.

A slot here is a block in a peer's memory. Its number is never used again, so that a reader that
comes too late finds nothing rather than something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import define, frozen

from commutator.kv import BlockKey, Peer, PeerAnswer, Slot, Stored, TierStatistics
from commutator.transfer import Span

__all__ = ["MOST_BLOCKS", "Lent", "LentBlocks", "longest_first"]

MOST_BLOCKS = 1 << 16
"""Of those that peers were found to have, so many are remembered by the manager."""


@frozen
class Lent:
    """A block as its peer described it."""

    stored: Stored
    span: Span
    peer: Peer
    address: str
    """Of the link to that peer."""
    lease: int
    peer_slot: Slot
    ends_s: float
    """When it must not be begun to be read any more."""


@define
class _Entry:
    lent: Lent
    pins: int = 0


class LentBlocks:
    """At most one block for a key. What is to be given back is returned to the caller."""

    def __init__(self) -> None:
        self._next: Slot = 0
        self._entries: dict[Slot, _Entry] = {}
        self._slots: dict[BlockKey, Slot] = {}

    def add(
        self, key: BlockKey, answer: PeerAnswer, index: int, address: str, ends_s: float
    ) -> None:
        """A peer lends the block at ``index`` of its answer. The key must not be known."""
        block, slot = answer.blocks[index], self._next
        self._next += 1
        lent = Lent(
            stored=Stored(key=key, slot=slot, size_bytes=block.size_bytes, checksum=block.checksum),
            span=Span(block.address, block.size_bytes, block.device),
            peer=Peer(answer.agent, answer.metadata),
            address=address,
            lease=answer.lease,
            peer_slot=block.slot,
            ends_s=ends_s,
        )
        self._entries[slot] = _Entry(lent)
        self._slots[key] = slot

    def lookup(self, key: BlockKey, now_s: float) -> Stored | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        lent = self._entries[slot].lent
        return lent.stored if now_s < lent.ends_s else None

    def lent(self, slot: Slot) -> Lent:
        """Raises ValueError for a slot that is free."""
        return self._entry(slot).lent

    def pin(self, slot: Slot) -> None:
        self._entry(slot).pins += 1

    def unpin(self, slot: Slot) -> Lent | None:
        """What is to be given back: a block that was read is not kept any longer."""
        entry = self._entry(slot)
        if not entry.pins:
            raise ValueError(f"slot {slot} is not pinned")
        entry.pins -= 1
        return None if entry.pins else self._drop(slot)

    def forget(self, key: BlockKey) -> Lent | None:
        """What is to be given back at once; a block that is read is, once it was."""
        slot = self._slots.pop(key, None)
        if slot is None or self._entries[slot].pins:
            return None
        return self._drop(slot)

    def expire(self, now_s: float) -> None:
        """Forget what leases do not keep any more, and nobody reads."""
        over = [slot for slot, entry in self._entries.items() if now_s >= entry.lent.ends_s]
        for slot in over:
            if not self._entries[slot].pins:
                self._drop(slot)

    def all(self, now_s: float) -> Iterator[Stored]:
        for slot in self._slots.values():
            lent = self._entries[slot].lent
            if now_s < lent.ends_s:
                yield lent.stored

    def clear(self) -> list[Lent]:
        """Forget everything; all of it is to be given back."""
        everything = [entry.lent for entry in self._entries.values()]
        self._entries.clear()
        self._slots.clear()
        return everything

    def statistics(self, now_s: float) -> TierStatistics:
        return TierStatistics(
            capacity=MOST_BLOCKS,
            committed=sum(1 for _ in self.all(now_s)),
            reserved=0,
            pinned=sum(1 for entry in self._entries.values() if entry.pins),
        )

    def _entry(self, slot: Slot) -> _Entry:
        entry = self._entries.get(slot)
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry

    def _drop(self, slot: Slot) -> Lent:
        lent = self._entries.pop(slot).lent
        if self._slots.get(lent.stored.key) == slot:
            del self._slots[lent.stored.key]
        return lent


def longest_first(answers: Sequence[tuple[str, PeerAnswer]]) -> list[tuple[str, PeerAnswer]]:
    """The peer with most of the chain first: reading from few peers costs least."""
    return sorted(answers, key=lambda answer: -len(answer[1].blocks))
