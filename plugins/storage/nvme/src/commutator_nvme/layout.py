"""The layout of slots in files, and the header of the index, which records it. No I/O."""

from __future__ import annotations

import struct
from hashlib import sha256

from attrs import field, frozen

from commutator import SlotGeometry
from commutator.errors import TierError
from commutator_engine_kit.kv import checksum
from commutator_nvme.config import NvmeConfig

__all__ = ["HEADER_BYTES", "PAGE_BYTES", "Header", "Layout", "digest_of", "parse_header"]

PAGE_BYTES = 4096
"""Direct I/O needs addresses, offsets and sizes that are multiples of the disk's sector."""

HEADER_BYTES = 2 * PAGE_BYTES
"""The first two pages of the index: two copies of its header."""

_MAGIC = b"CMTNVIDX"
_VERSION = 2
# magic | version | nonce | identity | bytes of a block | its tokens | of a slot | slots in a file
_FIELDS = struct.Struct("<8sI4xQ32sQQQQ")
_CHECKSUM = struct.Struct("<Q")


def digest_of(identity: str) -> bytes:
    """``Layout.identity`` for ``SlotGeometry.identity``."""
    return sha256(identity.encode()).digest()


@frozen(kw_only=True)
class Layout:
    """The properties of a folder that are fixed while it has blocks, and its capacity."""

    identity: bytes
    """SHA-256 of the deployment's cache identity."""
    block_bytes: int
    block_tokens: int
    slot_bytes: int
    """Distance between slots; a multiple of a page."""
    segment_slots: int
    """Slots in one file; the last file may have fewer."""
    slots: int = field(eq=False)
    """The capacity, which may change at a restart."""

    @classmethod
    def of(cls, config: NvmeConfig, geometry: SlotGeometry) -> Layout:
        """The layout for a configuration. Raises TierError when not even one slot fits."""
        slot_bytes = -(-geometry.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        layout = cls(
            identity=digest_of(geometry.identity),
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
        """Size of all files together."""
        return self.slots * self.slot_bytes

    def segment_of(self, slot: int) -> int:
        """The number of the file with the slot."""
        return slot // self.segment_slots

    def offset_of(self, slot: int) -> int:
        """The slot's offset in its file."""
        return slot % self.segment_slots * self.slot_bytes

    def segment_bytes(self) -> list[int]:
        """The size of each file."""
        full, rest = divmod(self.slots, self.segment_slots)
        return [self.segment_slots * self.slot_bytes] * full + [rest * self.slot_bytes] * bool(rest)

    def difference(self, other: Layout) -> str | None:
        """Why blocks of ``other`` cannot be used with this layout, as text; None if they can."""
        if other.identity != self.identity:
            return "belong to another model, tokenizer, dtype, parallel layout, codec or key"
        if other != self:
            return (
                f"have {other.block_bytes} bytes and {other.block_tokens} tokens in slots of "
                f"{other.slot_bytes} bytes and files of {other.segment_slots} slots, not "
                f"{self.block_bytes}, {self.block_tokens}, {self.slot_bytes} and "
                f"{self.segment_slots}"
            )
        return None


@frozen(kw_only=True)
class Header:
    """An index's layout and random nonce, which makes records of other indexes invalid."""

    nonce: int
    layout: Layout

    def pack(self) -> bytes:
        """``HEADER_BYTES`` bytes."""
        layout = self.layout
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.nonce,
            layout.identity,
            layout.block_bytes,
            layout.block_tokens,
            layout.slot_bytes,
            layout.segment_slots,
        )
        page = fields + _CHECKSUM.pack(checksum(fields))
        return page.ljust(PAGE_BYTES, b"\0") * 2


def parse_header(data: bytes) -> Header | None:
    """Read the header from either copy; None when neither is intact and of this version."""
    for copy in (data[:PAGE_BYTES], data[PAGE_BYTES:HEADER_BYTES]):
        if len(copy) < PAGE_BYTES:
            return None
        fields = copy[: _FIELDS.size]
        (stored,) = _CHECKSUM.unpack_from(copy, _FIELDS.size)
        magic, version, nonce, identity, block_bytes, block_tokens, slot_bytes, segment_slots = (
            _FIELDS.unpack(fields)
        )
        if magic == _MAGIC and version == _VERSION and stored == checksum(fields):
            layout = Layout(
                identity=identity,
                block_bytes=block_bytes,
                block_tokens=block_tokens,
                slot_bytes=slot_bytes,
                segment_slots=segment_slots,
                slots=0,
            )
            return Header(nonce=nonce, layout=layout)
    return None
