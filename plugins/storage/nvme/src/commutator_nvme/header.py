"""The first two pages of the index: two copies of what the folder is for."""

from __future__ import annotations

import struct

from attrs import frozen

from commutator.kv import checksum
from commutator_nvme.layout import PAGE_BYTES, Layout

__all__ = ["HEADER_BYTES", "Header", "parse_header"]

HEADER_BYTES = 2 * PAGE_BYTES

_MAGIC = b"CMTNVIDX"
_VERSION = 2
# magic | version | nonce | identity | bytes of a block | its tokens | of a slot | slots in a file
_FIELDS = struct.Struct("<8sI4xQ32sQQQQ")
_CHECKSUM = struct.Struct("<Q")


@frozen(kw_only=True)
class Header:
    """What one index is for. ``nonce`` is its own: records of another index do not fit in."""

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
    """The header from either of its copies; None when neither is an intact one of this version."""
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
