"""The block manager's actions. The caller carries those of one answer out in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from typing import Literal

from attrs import frozen

from commutator.contract.block import BlockDescriptor, BlockKey, BlockRemoved, BlockStored, KvEvent
from commutator_engine_kit.kv.groups import KvGroup, KvKind

DEVICE = -1
"""The engine's own arena as a source; tiers are numbered from 0, fastest first."""

TO_MAKE_ROOM = frozenset({"evicted", "moved down", "over capacity"})
"""Reasons to remove intact blocks. Such a block stays on a medium that other workers share."""


class JobUrgency(IntEnum):
    """Lower values run first; a tier's jobs of equal urgency run in order of submission."""

    FREE = 0
    """Moves no bytes, and makes room for stores."""
    LOAD = 1
    MAKE_ROOM = 2
    """A store: another block needs the room that this one has in its source."""
    OFFLOAD = 3
    """A store that no block or request waits for."""
    PREFETCH = 4
    """A store of a block that may never be requested."""
    VERIFY = 5


@frozen(kw_only=True)
class StoreBlocks:
    """Copy blocks from the device or a tier to another tier, then call ``finish_store``.

    ``target`` has room for all of them. The source holds them until ``finish_store``.
    """

    move_id: int
    source: int
    target: int
    offers: tuple[BlockDescriptor, ...]
    priority: JobUrgency

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The blocks' keys, in the order of ``offers``."""
        return tuple(offer.key for offer in self.offers)


@frozen(kw_only=True)
class FreeBlocks:
    """Remove committed blocks from a tier. No load or move reads them."""

    tier: int
    keys: tuple[BlockKey, ...]
    reason: str
    """Such as "evicted", "corrupt", "missing"; also the name of a counter."""

    @property
    def makes_room(self) -> bool:
        """Whether the blocks are intact, and only their slots are needed."""
        return self.reason in TO_MAKE_ROOM or self.reason == LoadResult.MISSING.value


@frozen(kw_only=True)
class ReleaseSource:
    """The device may reuse the blocks of these offers. A key is listed once for each offer."""

    keys: tuple[BlockKey, ...]


@frozen(kw_only=True)
class Announce:
    """Publish the KV event that blocks can be reused from a tier, or no longer."""

    what: Literal["stored", "removed"]
    tier: int
    medium: str
    blocks: tuple[BlockDescriptor, ...]
    """With parent, tokens, adapter and tenant; tokens may be empty after a restart."""


Action = StoreBlocks | FreeBlocks | ReleaseSource | Announce


class LoadResult(Enum):
    """Only ``LOADED`` blocks may be used. All other results are misses."""

    LOADED = "loaded"
    """The bytes are in place and verified."""
    MISSING = "missing"
    """The tier has no such block, or one that only other workers can read: it stays there."""
    CORRUPT = "corrupt"
    """The tier has other bytes: the block must not be read again."""
    FAILED = "failed"
    """The read failed; a later one may succeed."""


def event_hash(key: BlockKey) -> int:
    """A block's name in KV events: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def beside(group: KvGroup, number: int, keys: Sequence[BlockKey] = ()) -> BlockStored:
    """The event for blocks of a window or state on the device.

    ``keys`` are those of the same tokens in the group that routers follow. Without any, the event
    says of which kind a group is.
    """
    return BlockStored(
        block_hashes=tuple(map(event_hash, keys)),
        parent_block_hash=None,
        token_ids=(),
        block_size=group.block_size,
        group=number,
        keeps_prefix=group.keeps_prefix,
        window=group.window,
        chunked=group.kind is KvKind.CHUNKED,
    )


def announced(announcement: Announce, block_size: int) -> Iterator[KvEvent]:
    """The events for one announcement; consecutive blocks of a chain share one.

    Blocks without known tokens (stored by an earlier process) cause no event: routers identify
    blocks by their tokens.
    """
    if announcement.what == "removed":
        hashes = tuple(event_hash(offer.key) for offer in announcement.blocks)
        if hashes:
            yield BlockRemoved(block_hashes=hashes, medium=announcement.medium)
        return
    known = [offer for offer in announcement.blocks if len(offer.token_ids) == block_size]
    for chain in _chains(known):
        first = chain[0]
        yield BlockStored(
            block_hashes=tuple(event_hash(offer.key) for offer in chain),
            parent_block_hash=None if first.parent is None else event_hash(first.parent),
            token_ids=tuple(token for offer in chain for token in offer.token_ids),
            block_size=block_size,
            adapter=first.adapter,
            medium=announcement.medium,
            cache_salt=first.facts.tenant,
        )


def _chains(offers: Sequence[BlockDescriptor]) -> Iterator[list[BlockDescriptor]]:
    chain: list[BlockDescriptor] = []
    for offer in offers:
        if chain and offer.parent != chain[-1].key:
            yield chain
            chain = []
        chain.append(offer)
    if chain:
        yield chain
