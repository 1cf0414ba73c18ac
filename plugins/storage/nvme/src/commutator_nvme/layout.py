"""Where in the files a slot and its record lie. Pure."""

from __future__ import annotations

from hashlib import sha256

from attrs import field, frozen

from commutator.errors import TierError
from commutator.kv import SlotGeometry
from commutator_nvme.config import NvmeConfig

__all__ = ["PAGE_BYTES", "Layout"]

PAGE_BYTES = 4096
"""Direct I/O wants addresses, offsets and sizes that are multiples of the disk's sector."""


@frozen(kw_only=True)
class Layout:
    """What of a folder can never change while it has blocks in it, and how many there fit."""

    identity: bytes
    """SHA-256 of the deployment's cache identity."""
    block_bytes: int
    block_tokens: int
    slot_bytes: int
    """Distance between slots; a multiple of a page."""
    segment_slots: int
    """Slots in one file; the last file may have fewer."""
    slots: int = field(eq=False)
    """The capacity, which may change from one life to the next."""

    @classmethod
    def of(cls, config: NvmeConfig, geometry: SlotGeometry) -> Layout:
        """Raises TierError when not even one slot fits."""
        slot_bytes = -(-geometry.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        layout = cls(
            identity=sha256(geometry.identity.encode()).digest(),
            block_bytes=geometry.block_bytes,
            block_tokens=geometry.block_tokens,
            slot_bytes=slot_bytes,
            segment_slots=max(1, config.segment_size // slot_bytes),
            slots=config.capacity // slot_bytes,
        )
        if not layout.slots:
            raise TierError(
                f"nvme: a capacity of {config.capacity} bytes is less than one block; "
                f"set it to at least {slot_bytes}"
            )
        return layout

    @property
    def total_bytes(self) -> int:
        """Of all files together."""
        return self.slots * self.slot_bytes

    def segment_of(self, slot: int) -> int:
        """Which file has the slot."""
        return slot // self.segment_slots

    def offset_of(self, slot: int) -> int:
        """Where in its file the slot begins."""
        return slot % self.segment_slots * self.slot_bytes

    def segment_bytes(self) -> list[int]:
        """The size of each file."""
        full, rest = divmod(self.slots, self.segment_slots)
        return [self.segment_slots * self.slot_bytes] * full + [rest * self.slot_bytes] * bool(rest)

    def difference(self, other: Layout) -> str | None:
        """In words, what keeps the blocks of ``other`` from being used here."""
        if other.identity != self.identity:
            return "belong to another model, tokenizer, dtype, parallel layout or codec"
        if other != self:
            return (
                f"have {other.block_bytes} bytes and {other.block_tokens} tokens in slots of "
                f"{other.slot_bytes} bytes and files of {other.segment_slots} slots, not "
                f"{self.block_bytes}, {self.block_tokens}, {self.slot_bytes} and "
                f"{self.segment_slots}"
            )
        return None
