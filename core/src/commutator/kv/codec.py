"""Changes a block's bytes on their way to a tier and back: compression, encryption at rest."""

from __future__ import annotations

import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from typing import Any

from commutator.errors import TierError

__all__ = [
    "AesGcm",
    "Codec",
    "CodecError",
    "Lz4",
    "Zstd",
    "chain_name",
    "decode",
    "encode",
    "identity_with",
]


_FINGERPRINT_OF = b"commutator: which key encrypts KV blocks"
"""Nothing else is ever signed with that key."""


class CodecError(ValueError):
    """The bytes cannot be turned back into the block."""


class Codec(ABC):
    """One reversible change. Used by one thread."""

    name: str
    """Stored with each block; a block with other codecs than today's is a miss."""

    @property
    def fingerprint(self) -> str:
        """The same for whoever can read what this wrote, and no other. Tells no secret."""
        return self.name

    @abstractmethod
    def encode(self, data: memoryview, key: bytes) -> bytes:
        """The bytes to store for the block ``key``."""

    @abstractmethod
    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        """The block's bytes, at most ``max_bytes``. Raises CodecError."""

    @property
    @abstractmethod
    def overhead_bytes(self) -> int:
        """How much longer the result can be than what goes in, at most 1/128 of that apart."""


class Zstd(Codec):
    """zstandard, by the package `zstandard`."""

    overhead_bytes = 64

    def __init__(self, level: int = 1) -> None:
        self.name = "zstd"
        self._module = _needed("zstandard", "compression: zstd")
        self._compressor = self._module.ZstdCompressor(level=level)
        self._decompressor = self._module.ZstdDecompressor()

    def encode(self, data: memoryview, key: bytes) -> bytes:
        del key
        return bytes(self._compressor.compress(data))

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        del key
        try:
            size = self._module.frame_content_size(data)
            if not 0 <= size <= max_bytes:
                raise CodecError(f"it says that it decompresses to {size} bytes")
            return bytes(self._decompressor.decompress(data))
        except self._module.ZstdError as error:
            raise CodecError(str(error)) from error


class Lz4(Codec):
    """LZ4 frames, by the package `lz4`."""

    overhead_bytes = 64

    def __init__(self) -> None:
        self.name = "lz4"
        self._frame = _needed("lz4.frame", "compression: lz4")

    def encode(self, data: memoryview, key: bytes) -> bytes:
        del key
        return bytes(self._frame.compress(data))

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        del key
        try:
            decompressor = self._frame.LZ4FrameDecompressor()
            plain = bytes(decompressor.decompress(data, max_length=max_bytes))
        except RuntimeError as error:
            raise CodecError(str(error)) from error
        if not decompressor.eof:
            raise CodecError(f"it decompresses to more than {max_bytes} bytes, or ends too early")
        return plain


class AesGcm(Codec):
    """AES-GCM with a random nonce in front; the block's key is authenticated with it.

    ``secret`` is 16, 24 or 32 bytes. Needs the package `cryptography`.
    """

    _NONCE_BYTES = 12
    overhead_bytes = _NONCE_BYTES + 16

    def __init__(self, secret: bytes) -> None:
        self.name = "aes-gcm"
        aead = _needed("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        exceptions = _needed("cryptography.exceptions", "encryption")
        self._invalid: type[Exception] = exceptions.InvalidTag
        try:
            self._cipher = aead.AESGCM(secret)
        except ValueError as error:
            raise TierError(f"the encryption key has {len(secret)} bytes: {error}") from None
        self._fingerprint = hmac.new(secret, _FINGERPRINT_OF, sha256).hexdigest()

    @property
    def fingerprint(self) -> str:
        return f"{self.name}:{self._fingerprint}"

    def encode(self, data: memoryview, key: bytes) -> bytes:
        nonce = os.urandom(self._NONCE_BYTES)
        return nonce + bytes(self._cipher.encrypt(nonce, data, key))

    def decode(self, data: memoryview, key: bytes, max_bytes: int) -> bytes:
        del max_bytes  # it only gets shorter
        try:
            nonce, sealed = data[: self._NONCE_BYTES], data[self._NONCE_BYTES :]
            return bytes(self._cipher.decrypt(bytes(nonce), sealed, key))
        except (self._invalid, ValueError) as error:
            raise CodecError("it was not encrypted for this block with this key") from error


def chain_name(codecs: Sequence[Codec]) -> str:
    """What a frame's header says about the codecs that its payload went through, in order."""
    return "+".join(codec.name for codec in codecs)


def identity_with(codecs: Sequence[Codec], identity: str) -> str:
    """``SlotGeometry.identity`` of blocks that go through these codecs.

    Who has others on the same medium, or another key, neither finds these blocks nor removes them.
    """
    if not codecs:
        return identity
    chain = "+".join(codec.fingerprint for codec in codecs)
    return sha256(f"{identity} {chain}".encode()).hexdigest()


def encode(codecs: Sequence[Codec], data: memoryview, key: bytes) -> memoryview:
    """``data`` through every codec, first to last."""
    for codec in codecs:
        data = memoryview(codec.encode(data, key))
    return data


def decode(codecs: Sequence[Codec], data: memoryview, key: bytes, block_bytes: int) -> memoryview:
    """Undo ``encode``. Raises CodecError, also when the result is not ``block_bytes`` long."""
    most = block_bytes + block_bytes // 128 + sum(codec.overhead_bytes for codec in codecs)
    for codec in reversed(codecs):
        data = memoryview(codec.decode(data, key, most))
    if len(data) != block_bytes:
        raise CodecError(f"it decodes to {len(data)} bytes, not {block_bytes}")
    return data


def _needed(module: str, option: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".", maxsplit=1)[0]
        raise TierError(f"{option} needs the package {package}: pip install {package}") from error
