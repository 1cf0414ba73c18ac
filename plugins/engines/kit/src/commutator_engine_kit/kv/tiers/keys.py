"""A tier's keys: everything that is derived from `encryption_key`, `integrity_key`, `read_keys`.

Each secret gives independent keys for blocks, for what a tier keeps about them, and for names. A
block has a key of its own, so that no number of blocks uses up a key's random nonces; records are
sealed with AES-SIV, which withstands a repeated nonce; names are AES-SIV without a nonce: equal for
equal blocks, and only who has the key can make or read them.
"""

from __future__ import annotations

import hmac
import os
import struct
from copy import copy
from hashlib import sha256
from importlib import import_module
from typing import Any

from commutator.contract.block import KEY_BYTES, BlockKey
from commutator.contract.tier import BlockSeal
from commutator.errors import TierError

_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_RECORD_NONCE_BYTES = 16
_LENGTH = struct.Struct("<Q")


class CodecError(ValueError):
    """The bytes cannot be decoded."""


class TierKey(BlockSeal):
    """What follows from one secret of 16, 24 or 32 bytes. Needs the package `cryptography`.

    ``conceals``: encrypts (`encryption_key`); else it only authenticates (`integrity_key`). The
    same secret gives other keys for each. Thread-safe. ``with_identity`` makes it a tier's seal.
    """

    block_overhead_bytes = _ID_BYTES + _NONCE_BYTES + _TAG_BYTES

    def __init__(self, secret: bytes, *, conceals: bool) -> None:
        option = "encryption_key" if conceals else "integrity_key"
        if len(secret) not in {16, 24, 32}:
            raise TierError(
                f"the key of {option} has {len(secret)} bytes; it must have 16, 24 or 32"
            )
        aead = needed("cryptography.hazmat.primitives.ciphers.aead", option)
        exceptions = needed("cryptography.exceptions", option)
        self._invalid: type[Exception] = exceptions.InvalidTag
        self._gcm = aead.AESGCM
        self.conceals = conceals
        self._secret = secret
        self._id = self._derived("id")[:_ID_BYTES]
        self._block_secret = self._derived("blocks")
        self._tag_secret = self._derived("frames")
        self._record_secret = self._derived("records")
        self._records = aead.AESSIV(self._record_secret)
        self._names = aead.AESSIV(self._derived("names"))
        self.fingerprint = self._derived("fingerprint").hex()
        """Equal for equal secrets; reveals nothing about them."""
        self.identity = ""
        self.overhead_bytes = _ID_BYTES + _TAG_BYTES + (_RECORD_NONCE_BYTES if conceals else 0)

    def __repr__(self) -> str:
        return f"TierKey({'encryption' if self.conceals else 'integrity'})"

    def tag(self, key: BlockKey) -> bytes:
        """What a stored block's header has in place of its key: 32 bytes."""
        return _mac(self._tag_secret, key) if self.conceals else key

    def seal_block(self, data: memoryview, key: BlockKey) -> bytes:
        """A block's bytes, valid as this block only."""
        nonce = os.urandom(_NONCE_BYTES)
        cipher = self._gcm(_mac(self._block_secret, key))
        if self.conceals:
            return b"".join((self._id, nonce, cipher.encrypt(nonce, data, None)))
        return b"".join((self._id, nonce, cipher.encrypt(nonce, b"", data), data))

    def owns(self, sealed: memoryview) -> bool:
        """Whether a sealed block names this key."""
        return sealed[:_ID_BYTES] == self._id

    def open_block(self, sealed: memoryview, key: BlockKey) -> memoryview:
        """The bytes of a block that this key sealed. Raises CodecError."""
        cipher = self._gcm(_mac(self._block_secret, key))
        body = sealed[_ID_BYTES + _NONCE_BYTES :]
        nonce = bytes(sealed[_ID_BYTES : _ID_BYTES + _NONCE_BYTES])
        try:
            if self.conceals:
                return memoryview(cipher.decrypt(nonce, body, None))
            cipher.decrypt(nonce, body[:_TAG_BYTES], body[_TAG_BYTES:])
        except (self._invalid, ValueError) as error:
            raise CodecError("it was not sealed for this block with this key") from error
        return body[_TAG_BYTES:]

    def with_identity(self, identity: str) -> BlockSeal:
        """This key as a tier uses it, for blocks of one identity."""
        seal = copy(self)
        seal.identity = identity
        return seal

    def seal(self, data: bytes, place: bytes) -> bytes:
        if not self.conceals:
            return self._id + self._record_mac(data, place) + data
        nonce = os.urandom(_RECORD_NONCE_BYTES)
        return b"".join((self._id, nonce, self._records.encrypt(data, [place, nonce])))

    def unseal(self, sealed: bytes, place: bytes) -> bytes | None:
        if sealed[:_ID_BYTES] != self._id or len(sealed) <= self.overhead_bytes:
            return None
        body = sealed[_ID_BYTES:]
        if not self.conceals:
            data = body[_TAG_BYTES:]
            intact = hmac.compare_digest(body[:_TAG_BYTES], self._record_mac(data, place))
            return data if intact else None
        nonce, rest = body[:_RECORD_NONCE_BYTES], body[_RECORD_NONCE_BYTES:]
        try:
            return bytes(self._records.decrypt(rest, [place, nonce]))
        except (self._invalid, ValueError):
            return None

    def name(self, key: BlockKey) -> str:
        return bytes(self._names.encrypt(key, None)).hex() if self.conceals else key.hex()

    def key_of(self, name: str) -> BlockKey | None:
        try:
            data = bytes.fromhex(name)
            key = bytes(self._names.decrypt(data, None)) if self.conceals else data
        except (self._invalid, ValueError):
            return None
        # Names have one spelling; fromhex() takes upper case and spaces, too.
        return key if len(key) == KEY_BYTES and self.name(key) == name else None

    def _record_mac(self, data: bytes, place: bytes) -> bytes:
        framed = _LENGTH.pack(len(place)) + place + data
        return _mac(self._record_secret, framed)[:_TAG_BYTES]

    def _derived(self, purpose: str) -> bytes:
        """32 bytes for one purpose. The secret is uniform: one HMAC suffices to derive them."""
        mode = "encryption" if self.conceals else "integrity"
        return _mac(self._secret, f"commutator tier key 1: {mode}: {purpose}".encode())


def needed(module: str, option: str) -> Any:
    """Import a package that an option needs. Raises TierError with how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".", maxsplit=1)[0]
        raise TierError(f"{option} needs the package {package}: pip install {package}") from error


def _mac(secret: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, data, sha256)
