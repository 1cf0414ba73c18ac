"""What makes two KV blocks the same: their tokens, every token before them, and the namespace."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from commutator.kv import CacheIdentity, event_hash, next_key

__all__ = ["ANONYMOUS", "BlockIdentity", "Namespace"]

ANONYMOUS = CacheIdentity(model="", weights="", tokenizer="", dtype="", layout="", block_size=0)
"""Enough where blocks never leave the engine."""


@frozen
class Namespace:
    """Requests share KV blocks only within one namespace."""

    lora_name: str | None = None
    cache_salt: str | None = None
    base: CacheIdentity = ANONYMOUS

    @property
    def digest(self) -> bytes:
        """Root of every chain in this namespace; equal only for equal namespaces."""
        return evolve(self.base, lora_name=self.lora_name, cache_salt=self.cache_salt).digest


@frozen
class BlockIdentity:
    """A full block's place in its chain; build it with ``first`` and ``child``."""

    parent_digest: bytes
    """The previous block's digest, or the namespace's for the first block."""
    token_ids: tuple[int, ...]
    namespace: Namespace
    is_first: bool
    digest: bytes
    """SHA-256 over the parent's digest and the token ids as little-endian 64-bit integers."""

    @classmethod
    def first(cls, namespace: Namespace, token_ids: Sequence[int]) -> BlockIdentity:
        """The identity of a prompt's first block."""
        return _chained(namespace.digest, token_ids, namespace, is_first=True)

    def child(self, token_ids: Sequence[int]) -> BlockIdentity:
        """The identity of the block that follows this one."""
        return _chained(self.digest, token_ids, self.namespace, is_first=False)

    @property
    def event_hash(self) -> int:
        """The low 64 bits of the digest, unsigned: this block's name in KV events."""
        return event_hash(self.digest)

    @property
    def parent_event_hash(self) -> int | None:
        """The parent's name in KV events; None for a first block."""
        return None if self.is_first else event_hash(self.parent_digest)


def _chained(
    parent_digest: bytes, token_ids: Sequence[int], namespace: Namespace, *, is_first: bool
) -> BlockIdentity:
    digest = next_key(parent_digest, token_ids)
    return BlockIdentity(parent_digest, tuple(token_ids), namespace, is_first, digest)
