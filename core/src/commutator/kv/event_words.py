"""What routers are told about tiers: the manager's announcements as KV events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commutator.kv.actions import Announce
from commutator.kv.events import BlockRemoved, BlockStored, KvEvent
from commutator.kv.keys import BlockKey
from commutator.kv.offer import Offer

__all__ = ["announced", "event_hash"]


def event_hash(key: BlockKey) -> int:
    """A block's name in KV events: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def announced(announcement: Announce, block_size: int) -> Iterator[KvEvent]:
    """The events for one announcement; consecutive blocks of a chain share one.

    Blocks whose tokens are not known (a former life's) cannot be told of: routers name blocks by
    their tokens.
    """
    if announcement.what == "removed":
        hashes = tuple(event_hash(offer.key) for offer in announcement.blocks)
        if hashes:
            yield BlockRemoved(hashes, announcement.medium)
        return
    known = [offer for offer in announcement.blocks if len(offer.token_ids) == block_size]
    for chain in _chains(known):
        first = chain[0]
        yield BlockStored(
            block_hashes=tuple(event_hash(offer.key) for offer in chain),
            parent_block_hash=None if first.parent is None else event_hash(first.parent),
            token_ids=tuple(token for offer in chain for token in offer.token_ids),
            block_size=block_size,
            lora_name=first.lora_name,
            medium=announcement.medium,
            cache_salt=first.facts.tenant,
        )


def _chains(offers: Sequence[Offer]) -> Iterator[list[Offer]]:
    chain: list[Offer] = []
    for offer in offers:
        if chain and offer.parent != chain[-1].key:
            yield chain
            chain = []
        chain.append(offer)
    if chain:
        yield chain
