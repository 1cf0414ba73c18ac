"""Blocks that will be needed come up to the fastest tier before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from commutator.kv.actions import Action
from commutator.kv.index import BlockIndex
from commutator.kv.keys import BlockKey
from commutator.kv.stores import StoreSide
from commutator.kv.tier_book import TierBook

__all__ = ["prefetch"]

_MOST_SHARE = 0.25
"""Largest part of a tier that may be on its way there for this, or wait for room."""


def prefetch(
    index: BlockIndex, stores: StoreSide, keys: Sequence[BlockKey], first: int, now_s: float
) -> list[Action]:
    """Copy what of a chain lies only in slower tiers to the fastest that is written to.

    The copies stay where they were, too. What came before in the chain is not evicted for it.
    """
    target = _target(index)
    if target is None:
        return []
    actions: list[Action] = []
    spared = set(keys)
    room = int(_MOST_SHARE * target.capacity) - target.staged - len(target.waiting)
    tiers = index.match(keys, first)
    for key, tier in zip(keys[first : first + len(tiers)], tiers, strict=True):
        if room <= 0:
            break
        source = index.books[tier]
        if tier <= target.number or key in source.moving_down:
            continue
        if stores.enqueue(target, index.nodes[key].offer, tier, now_s, actions, spared):
            source.pin(key)
            room -= 1
    stores.settle(now_s, actions, spared)
    return actions


def _target(index: BlockIndex) -> TierBook | None:
    written = (book for book in index.books if book.spec.write != "never")
    fastest = next((book for book in written if book.up), None)
    return fastest if fastest is not None and fastest.spec.prefetch else None
