"""Codecs for stored blocks (compression, encryption, authentication), and their header."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256

from attrs import frozen

from commutator.contract.block import KEY_BYTES, BlockKey
from commutator.contract.tier import BlockSeal
from commutator_engine_kit.kv.arena import checksum
from commutator_engine_kit.kv.tiers.keys import CodecError, TierKey, needed


class Codec(ABC):
    """One reversible encoding. An instance is used by one thread."""

    name: str
    """Stored with each block. A block with other codecs than the configured ones is a miss."""

    @property
    def fingerprint(self) -> str:
        """Equal exactly for codecs that can decode each other's output. Reveals no secret."""
        return self.name

    @abstractmethod
    def encode(self, data: memoryview, key: bytes) -> bytes:
        """The bytes to store for the block ``key``."""

    @abstractmethod
    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes | memoryview:
        """The block's bytes, at most ``max_bytes``. Raises CodecError."""

    @property
    @abstractmethod
    def overhead_bytes(self) -> int:
        """Largest growth of a block in bytes, beside 1/128 of its size."""


class Zstd(Codec):
    """zstandard. Needs the package `zstandard`."""

    overhead_bytes = 64

    def __init__(self, level: int = 1) -> None:
        self.name = "zstd"
        self._module = needed("zstandard", "compression: zstd")
        self._compressor = self._module.ZstdCompressor(level=level)
        self._decompressor = self._module.ZstdDecompressor()

    def encode(self, data: memoryview, key: bytes) -> bytes:
        return bytes(self._compressor.compress(data))

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        try:
            size = self._module.frame_content_size(data)
            if not 0 <= size <= max_bytes:
                raise CodecError(f"its header gives a decompressed size of {size} bytes")
            return bytes(self._decompressor.decompress(data))
        except self._module.ZstdError as error:
            raise CodecError(str(error)) from error


class Lz4(Codec):
    """LZ4 frames. Needs the package `lz4`."""

    overhead_bytes = 64

    def __init__(self) -> None:
        self.name = "lz4"
        self._frame = needed("lz4.frame", "compression: lz4")

    def encode(self, data: memoryview, key: bytes) -> bytes:
        return bytes(self._frame.compress(data))

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        try:
            decompressor = self._frame.LZ4FrameDecompressor()
            plain = bytes(decompressor.decompress(data, max_length=max_bytes))
        except RuntimeError as error:
            raise CodecError(str(error)) from error
        if not decompressor.eof:
            raise CodecError(f"it decompresses to more than {max_bytes} bytes, or ends too early")
        return plain


class _Keyed(Codec):
    """The last codec of a chain: seals a block under a key, and reads it under several."""

    overhead_bytes = TierKey.block_overhead_bytes

    conceals: bool

    def __init__(self, secret: bytes, *read_secrets: bytes) -> None:
        self.keys = [TierKey(one, conceals=self.conceals) for one in (secret, *read_secrets)]
        """The current one, and then those that are only read."""

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_of(self.keys[0])

    def fingerprint_of(self, key: TierKey) -> str:
        """``fingerprint`` while ``key`` is the current one."""
        return f"{self.name}:{key.fingerprint}"

    def encode(self, data: memoryview, key: bytes) -> bytes:
        return self.keys[0].seal_block(data, key)

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> memoryview:
        for tier_key in self.keys:
            if tier_key.owns(data):  # opening only shortens
                return tier_key.open_block(data, key)
        raise CodecError("it was not sealed with any of this tier's keys")


class AesGcm(_Keyed):
    """AES-GCM, under a key derived for each block, with a random nonce before the data.

    Secrets are 16, 24 or 32 bytes; blocks under ``read_secrets`` are read, too. Needs the package
    `cryptography`.
    """

    name = "aes-gcm"
    conceals = True


class Gmac(_Keyed):
    """AES-GMAC: as ``AesGcm``, but the data stay readable, with an authentic tag before them."""

    name = "gmac"
    conceals = False


def chain_name(codecs: Sequence[Codec]) -> str:
    """The codecs' names in order, as a frame's header has them."""
    return "+".join(codec.name for codec in codecs)


def identity_with(codecs: Sequence[Codec], identity: str) -> str:
    """``SlotGeometry.identity`` of blocks that go through these codecs.

    A worker with other codecs or another key on the same medium neither finds nor removes them.
    """
    return _identity([codec.fingerprint for codec in codecs], identity)


def seals_of(codecs: Sequence[Codec], identity: str) -> tuple[BlockSeal, ...]:
    """``SlotGeometry.seals``, one for each key of the last codec; empty when it has none.

    The first has the identity that ``identity_with`` returns.
    """
    if not codecs or not isinstance(last := codecs[-1], _Keyed):
        return ()
    before = [codec.fingerprint for codec in codecs[:-1]]
    return tuple(
        key.with_identity(_identity([*before, last.fingerprint_of(key)], identity))
        for key in last.keys
    )


def frame_tags(codecs: Sequence[Codec], key: BlockKey) -> list[bytes]:
    """What stands for the block in its frame's header: as it is written, then as it may be read.

    Its key itself, unless a reader of it could confirm a guessed prompt.
    """
    if not codecs or not isinstance(last := codecs[-1], _Keyed):
        return [key]
    return [tier_key.tag(key) for tier_key in last.keys]


def _identity(fingerprints: Sequence[str], identity: str) -> str:
    if not fingerprints:
        return identity
    return sha256(f"{identity} {'+'.join(fingerprints)}".encode()).hexdigest()


def encode(codecs: Sequence[Codec], data: memoryview, key: bytes) -> memoryview:
    """Encode ``data`` with every codec, first to last."""
    for codec in codecs:
        data = memoryview(codec.encode(data, key))
    return data


def decode(codecs: Sequence[Codec], data: memoryview, key: bytes, block_bytes: int) -> memoryview:
    """Undo ``encode``. Raises CodecError, also when the size is not ``block_bytes``."""
    most = block_bytes + block_bytes // 128 + sum(codec.overhead_bytes for codec in codecs)
    for codec in reversed(codecs):
        data = memoryview(codec.decode(data, key, most))
    if len(data) != block_bytes:
        raise CodecError(f"it decodes to {len(data)} bytes, not {block_bytes}")
    return data


_MAGIC = b"CMTKVBLK"
_VERSION = 1
_CODEC_BYTES = 48
_FIELDS = struct.Struct(f"<8sH6x{KEY_BYTES}sQQQ{_CODEC_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class FrameError(ValueError):
    """The bytes are not an intact block with the expected key."""


@frozen(kw_only=True)
class FrameHeader:
    """The header of a stored block; its payload follows."""

    tag: bytes
    """Which block it is: 32 bytes, see ``frame_tags``."""
    block_bytes: int
    """Size of the block once decoded."""
    payload_bytes: int
    checksum: int
    """Of the payload as stored."""
    codec: str = ""
    """How the payload was encoded, such as "zstd+aes-gcm"; empty: not encoded."""

    def pack(self) -> bytes:
        """``HEADER_BYTES`` bytes. Raises ValueError for a codec name that is too long."""
        codec = self.codec.encode("ascii")
        if len(codec) > _CODEC_BYTES:
            raise ValueError(f"the codec name {self.codec!r} is longer than {_CODEC_BYTES} bytes")
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.tag,
            self.block_bytes,
            self.payload_bytes,
            self.checksum,
            codec,
        )
        return fields + _CHECKSUM.pack(checksum(fields))

    @classmethod
    def parse(cls, data: memoryview, *tags: bytes) -> FrameHeader:
        """Read the header of a frame that must have one of these tags. Raises FrameError."""
        if len(data) < HEADER_BYTES:
            raise FrameError(f"{len(data)} bytes are too few for a header")
        fields = data[: _FIELDS.size]
        (stored,) = _CHECKSUM.unpack(data[_FIELDS.size : HEADER_BYTES])
        magic, version, found, block_bytes, payload_bytes, payload_checksum, codec = _FIELDS.unpack(
            fields
        )
        if magic != _MAGIC:
            raise FrameError("these bytes are not a KV block")
        if stored != checksum(fields):
            raise FrameError("the header is damaged")
        if version != _VERSION:
            raise FrameError(f"the block has format {version}, not {_VERSION}")
        if found not in tags:
            raise FrameError("this is another block")
        if HEADER_BYTES + payload_bytes > len(data):
            raise FrameError(f"{payload_bytes} bytes of payload do not fit into {len(data)}")
        return cls(
            tag=found,
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
