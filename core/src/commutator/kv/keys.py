"""Identity of a KV block: what it was computed from and how it is laid out, as one digest.

Two blocks with the same key hold the same bytes, wherever they lie; blocks that differ in anything
that changes those bytes, or in who may see them, never have the same key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from attrs import asdict, frozen

__all__ = ["KEY_BYTES", "BlockKey", "CacheIdentity", "block_keys", "next_key"]

BlockKey = bytes
"""SHA-256 over the parent's key and the block's tokens; the first block's parent is the identity's
digest."""

KEY_BYTES = 32


@frozen(kw_only=True)
class CacheIdentity:
    """Everything but the tokens that decides a block's bytes, or who may use it."""

    model: str
    weights: str
    """The weights' revision, such as a digest of the file."""
    tokenizer: str
    """A digest of the tokenizer: equal ids must mean equal text."""
    dtype: str
    layout: str
    """Order and sizes of a block's dimensions, in the engine's own words."""
    block_size: int
    """Tokens in a block."""
    parallel_rank: str = "0/1"
    """Which part of each block this is, when tensor or pipeline parallelism cuts it up."""
    lora_name: str | None = None
    cache_salt: str | None = None
    """Tenants with different salts share nothing."""

    @property
    def digest(self) -> bytes:
        """Root of every chain of keys; equal only for equal identities."""
        return sha256(b"".join(_framed(value) for value in asdict(self).values())).digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    """The key of a full block after ``parent``: a block's key, or an identity's digest."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}Q", *token_ids)).digest()


def block_keys(
    identity: CacheIdentity, token_ids: Sequence[int], known: Sequence[BlockKey] = ()
) -> list[BlockKey]:
    """The key of every full block of ``token_ids``; ``known`` are those of the first blocks."""
    size = identity.block_size
    keys = list(known)
    parent = keys[-1] if keys else identity.digest
    for start in range(len(keys) * size, len(token_ids) - size + 1, size):
        parent = next_key(parent, token_ids[start : start + size])
        keys.append(parent)
    return keys


def _framed(value: str | int | None) -> bytes:
    """No two different values, and no two sequences of them, have the same bytes."""
    if value is None:
        return b"0"
    # A JSON client can send lone surrogates, which strict UTF-8 refuses.
    encoded = str(value).encode("utf-8", "surrogatepass")
    return b"1" + struct.pack("<Q", len(encoded)) + encoded
