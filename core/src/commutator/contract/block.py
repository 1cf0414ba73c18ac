"""Identity, retention and events of KV blocks.

A block's key is one digest of what the block was computed from and of its layout.

Two blocks with the same key hold the same bytes, in any tier and worker. Blocks that differ in
anything that changes those bytes, or in who may see them, never have the same key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import sha256

from attrs import asdict, evolve, frozen

from commutator.contract.request import KvRetention, MediaIdentity

__all__ = [
    "KEY_BYTES",
    "MAX_PRIORITY",
    "PLAIN",
    "BlockDescriptor",
    "BlockKey",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "CacheIdentity",
    "CacheLevel",
    "EventBatch",
    "KvEvent",
    "RetentionHints",
    "block_keys",
    "cache_level",
    "is_stronger",
    "media_in",
    "next_key",
    "retention_hints",
    "strongest",
    "supersedes",
]

BlockKey = bytes
"""SHA-256 over the parent's key and the block's tokens; the first block's parent is the identity's
digest."""


KEY_BYTES = 32
"""Length of a ``BlockKey``."""


@frozen(kw_only=True)
class CacheIdentity:
    """Everything but the tokens that decides a block's bytes, or who may use it."""

    model: str
    """The model's name, as the engine knows it."""
    weights: str
    """The weights' revision, such as a digest of the file."""
    tokenizer: str
    """A digest of the tokenizer: equal ids must mean equal text."""
    dtype: str
    """Number format of the cached values, such as "bfloat16"."""
    layout: str
    """Order and sizes of a block's dimensions, in a notation of the engine; compared as text."""
    block_size: int
    """Tokens in a block."""
    parallel_rank: str = "0/1"
    """Which part of each block this is, "RANK/RANKS", under tensor or pipeline parallelism."""
    adapter: str | None = None
    """The digest of the adapter that computed the block; None: the model itself."""
    cache_salt: str | None = None
    """Requests with different salts share no block; None is a salt, too."""
    group: str | None = None
    """Which of the model's kinds of KV the block holds; None: all, where there is only one."""

    @property
    def digest(self) -> bytes:
        """The parent of the first block's key: 32 bytes, equal only for equal identities."""
        values = list(asdict(self).values())
        if self.group is None:  # as before there were groups: what is stored stays valid
            values.pop()
        return sha256(b"".join(map(_framed, values))).digest()


def next_key(parent: bytes, token_ids: Sequence[int], media: bytes = b"") -> BlockKey:
    """The key of a full block after ``parent``: a block's key, or an identity's digest.

    ``media`` says what some of its tokens stand for, as ``media_in``.
    """
    return sha256(parent + struct.pack(f"<{len(token_ids)}Q", *token_ids) + media).digest()


def media_in(media: Iterable[MediaIdentity], start: int, stop: int) -> bytes:
    """What the tokens of the positions from ``start`` to before ``stop`` stand for.

    Equal only for equal parts of equal media at equal places; empty for text alone.
    """
    return b"".join(
        struct.pack("<q", one.start - start) + bytes.fromhex(one.digest)
        for one in media
        if one.start < stop and one.start + one.tokens > start
    )


def block_keys(
    identity: CacheIdentity,
    token_ids: Sequence[int],
    known: Sequence[BlockKey] = (),
    media: Sequence[MediaIdentity] = (),
) -> list[BlockKey]:
    """The key of every full block of ``token_ids``; ``known`` are the keys of its first blocks.

    ``media`` is all that some of the tokens stand for.
    """
    size = identity.block_size
    keys = list(known)
    parent = keys[-1] if keys else identity.digest
    for start in range(len(keys) * size, len(token_ids) - size + 1, size):
        inside = media_in(media, start, start + size) if media else b""
        parent = next_key(parent, token_ids[start : start + size], inside)
        keys.append(parent)
    return keys


def _framed(value: str | int | None) -> bytes:
    """Bytes of a value; different sequences of values have different bytes."""
    if value is None:
        return b"0"
    # A JSON client can send lone surrogates, which strict UTF-8 refuses.
    encoded = str(value).encode("utf-8", "surrogatepass")
    return b"1" + struct.pack("<Q", len(encoded)) + encoded


MAX_PRIORITY = 10
"""Priorities are from minus this to this; others are cut to this range."""


@frozen(kw_only=True)
class RetentionHints:
    """The retention that a request wants for a block, and the block's position in its chain."""

    priority: int = 0
    """-10 to 10; blocks of a lower priority are evicted first."""
    ttl_s: float | None = None
    """Seconds after its last use from which the block is evicted before others; None: no limit."""
    pinned: bool = False
    """Whether it is not evicted to make room before ``ttl_s`` has passed; without: never."""
    is_prompt: bool = True
    """Whether all of its tokens belong to the prompt."""
    tenant: str | None = None
    """The cache salt of the request; None: without a salt."""
    depth: int = 0
    """Number of blocks before it in its chain."""
    behind: bool = False
    """A window or state before the prompt's end, of use only to prompts that branch off there."""

    @property
    def is_plain(self) -> bool:
        """Whether no retention was requested."""
        return self.priority == 0 and self.ttl_s is None and not self.pinned


PLAIN = RetentionHints()
"""Hints of a block for which no retention was requested."""


@frozen(kw_only=True)
class BlockDescriptor:
    """One full block that was computed, with all that a KV event says about it."""

    key: BlockKey
    """The block's key."""
    parent: BlockKey | None
    """The key before it in its chain; None for a first block."""
    token_ids: tuple[int, ...]
    """The block's own tokens, ``block_size`` of them."""
    facts: RetentionHints = PLAIN
    """Its retention and its position in the chain."""
    adapter: str | None = None
    """The adapter that computed it; None: the model itself."""
    stands_beside: BlockKey | None = None
    """Of a window or state: the block of the same tokens in the group that routers follow."""
    group: int = 0
    """The number of its group of layers."""


def retention_hints(
    index: int,
    block_size: int,
    prompt_tokens: int,
    tenant: str | None = None,
    retention: Sequence[KvRetention] = (),
) -> RetentionHints:
    """The hints of full block ``index``: the strongest of ``retention`` that covers it."""
    end = (index + 1) * block_size
    plain = RetentionHints(is_prompt=end <= prompt_tokens, tenant=tenant, depth=index)
    asked = [
        evolve(plain, priority=kept.priority, ttl_s=kept.ttl_s, pinned=kept.pinned)
        for kept in retention
        if end <= (prompt_tokens if kept.tokens is None else kept.tokens)
    ]
    return strongest(asked) if asked else plain


def strongest(facts: Sequence[RetentionHints]) -> RetentionHints:
    """The strongest of several hints for one block; see ``is_stronger``."""
    return max(facts, key=_strength)


def is_stronger(new: RetentionHints, old: RetentionHints) -> bool:
    """Whether ``new`` retains a block longer than ``old``: by pinning, then priority, then TTL."""
    return _strength(new) > _strength(old)


def supersedes(new: RetentionHints, old: RetentionHints) -> bool:
    """Whether ``new`` replaces ``old`` as a block's hints: stronger, or only ``old`` is plain."""
    return not new.is_plain if old.is_plain else is_stronger(new, old)


def _strength(facts: RetentionHints) -> tuple[bool, int, float]:
    return facts.pinned, facts.priority, float("inf") if facts.ttl_s is None else facts.ttl_s


class CacheLevel(IntEnum):
    """How far a block is from the engine, fastest first; of several copies the first counts."""

    DEVICE = 0
    """The GPU's memory, or the memory that an engine computes in."""
    HOST = 1
    """The worker's main memory."""
    DISK = 2
    """A local disk, or host memory that is slower than ``HOST``."""
    EXTERNAL = 3
    """An object store, a shared cache or another machine."""


_TIERS = {
    "GPU": CacheLevel.DEVICE,
    "DEVICE": CacheLevel.DEVICE,
    "CPU": CacheLevel.HOST,
    "CPU_PINNED": CacheLevel.HOST,
    "CPU_TIER1": CacheLevel.HOST,
    "CPU_TIER2": CacheLevel.DISK,
    "DISK": CacheLevel.DISK,
    "NVME": CacheLevel.DISK,
    "STORAGE": CacheLevel.DISK,
    "EXTERNAL": CacheLevel.EXTERNAL,
    "NETWORK": CacheLevel.EXTERNAL,
    "REMOTE": CacheLevel.EXTERNAL,
    "SHARED": CacheLevel.EXTERNAL,
}


def cache_level(medium: str | None) -> CacheLevel | None:
    """The level of a medium, whatever its case; ``DEVICE`` for None, None for an unknown medium.

    Known are "GPU" and "DEVICE"; "CPU", "CPU_PINNED" and "CPU_TIER1" (``HOST``); "CPU_TIER2",
    "DISK", "NVME" and "STORAGE" (``DISK``); "EXTERNAL", "NETWORK", "REMOTE" and "SHARED"
    (``EXTERNAL``).
    """
    return CacheLevel.DEVICE if medium is None else _TIERS.get(medium.upper())


BlockHash = int | bytes
"""An engine's name of a block: a signed or unsigned 64-bit integer, or bytes."""


@frozen(kw_only=True)
class BlockStored:
    """Blocks became reusable."""

    block_hashes: tuple[BlockHash, ...]
    """The engine's names of the blocks, in the order of the chain."""
    parent_block_hash: BlockHash | None
    """The block before the first of them; None when that is the first of a prompt."""
    token_ids: tuple[int, ...]
    """``block_size`` tokens for each block, in the same order."""
    block_size: int
    """Tokens in one block."""
    adapter: str | None = None
    """The adapter that computed the blocks; None: the model itself."""
    medium: str | None = "GPU"
    """Where they are: a name that ``cache_level`` knows. None means the device."""
    cache_salt: str | None = None
    """The salt of the requests that may use the blocks; read only with a first block."""
    group: int | None = None
    """The group of layers that holds them, in models with several kinds of attention; else None."""
    keeps_prefix: bool = True
    """False for layers that need only a window of the prompt, or a state computed from it. Their
    blocks are named as those of the same tokens that keep prefixes, without tokens."""
    window: int = 0
    """Tokens of the window or chunk; 0: the layers keep a state, or whole prefixes."""
    chunked: bool = False
    """Whether a token sees those of its own chunk, not of a window that ends with it."""


@frozen(kw_only=True)
class BlockRemoved:
    """Blocks are no longer reusable."""

    block_hashes: tuple[BlockHash, ...]
    """The engine's names of the blocks."""
    medium: str | None = "GPU"
    """Where they were; copies on other media stay. None means the device."""
    group: int | None = None
    """The group of layers, as in ``BlockStored``."""


@frozen(kw_only=True)
class BlocksCleared:
    """The worker holds no reusable block any more."""


KvEvent = BlockStored | BlockRemoved | BlocksCleared
"""One change of the set of reusable blocks."""


@frozen(kw_only=True)
class EventBatch:
    """One published message of KV events."""

    timestamp_s: float
    """When it was published: seconds since the Unix epoch, by the publisher's clock."""
    events: tuple[KvEvent, ...]
    """In the order in which they happened."""
    data_parallel_rank: int = 0
    """The rank whose blocks changed, from 0."""
