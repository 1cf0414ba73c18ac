"""The header in front of a block where the medium keeps bytes but not what they are.

Bytes, little-endian: magic 8 | version u16 | reserved 6 | key 32 | block size u64 |
payload size u64 | payload checksum u64 | codec 48 (name in ASCII, zero-padded) | header checksum
u64. Together 128. Whatever does not fit exactly is no block: it is a miss, and counted.
"""

from __future__ import annotations

import struct

from attrs import frozen

from commutator.kv.checksum import checksum
from commutator.kv.keys import KEY_BYTES, BlockKey

__all__ = ["HEADER_BYTES", "FrameError", "FrameHeader"]

_MAGIC = b"CMTKVBLK"
_VERSION = 1
_CODEC_BYTES = 48
_FIELDS = struct.Struct(f"<8sH6x{KEY_BYTES}sQQQ{_CODEC_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class FrameError(ValueError):
    """The bytes are no intact block with the expected key."""


@frozen(kw_only=True)
class FrameHeader:
    """What the header tells about the payload behind it."""

    key: BlockKey
    block_bytes: int
    """Size of the block once decoded."""
    payload_bytes: int
    checksum: int
    """Of the payload as stored."""
    codec: str = ""
    """How the payload was encoded, such as "zstd+aes-gcm"; empty when it is the block itself."""

    def pack(self) -> bytes:
        """``HEADER_BYTES`` bytes. Raises ValueError for a codec name that is too long."""
        codec = self.codec.encode("ascii")
        if len(codec) > _CODEC_BYTES:
            raise ValueError(f"the codec name {self.codec!r} is longer than {_CODEC_BYTES} bytes")
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.key,
            self.block_bytes,
            self.payload_bytes,
            self.checksum,
            codec,
        )
        return fields + _CHECKSUM.pack(checksum(fields))

    @classmethod
    def parse(cls, data: memoryview, key: BlockKey) -> FrameHeader:
        """Read the header of a frame that must hold ``key``. Raises FrameError."""
        if len(data) < HEADER_BYTES:
            raise FrameError(f"{len(data)} bytes are too few for a header")
        fields = data[: _FIELDS.size]
        (stored,) = _CHECKSUM.unpack(data[_FIELDS.size : HEADER_BYTES])
        magic, version, found, block_bytes, payload_bytes, payload_checksum, codec = _FIELDS.unpack(
            fields
        )
        if magic != _MAGIC:
            raise FrameError("these bytes are no KV block")
        if stored != checksum(fields):
            raise FrameError("the header is damaged")
        if version != _VERSION:
            raise FrameError(f"the block has format {version}, not {_VERSION}")
        if found != key:
            raise FrameError("this is another block")
        if HEADER_BYTES + payload_bytes > len(data):
            raise FrameError(f"{payload_bytes} bytes of payload do not fit into {len(data)}")
        return cls(
            key=found,
            block_bytes=block_bytes,
            payload_bytes=payload_bytes,
            checksum=payload_checksum,
            codec=codec.rstrip(b"\0").decode("ascii", "replace"),
        )

    def payload(self, data: memoryview) -> memoryview:
        """The payload, verified. ``data`` begins with this header. Raises FrameError."""
        payload = data[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
        if checksum(payload) != self.checksum:
            raise FrameError("the payload is damaged")
        return payload
