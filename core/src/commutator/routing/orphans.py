"""Blocks whose parent is not known yet: kept aside, so many and no more."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field

from commutator.kv.medium import Tier

__all__ = ["BlockKey", "Orphan", "Orphans"]

BlockKey = int | bytes | tuple[int | bytes, int]
"""An engine's name for a block; for a part of a block that is larger than ours, with its number."""


@define
class Orphan:
    """A block that cannot be placed in a sequence."""

    parent: BlockKey
    local_hash: int
    tiers: set[Tier] = field(factory=set)


@define(eq=False)
class Orphans:
    """At most ``limit`` blocks; the oldest go first."""

    limit: int
    dropped: int = 0
    """Blocks given up because there were too many."""
    _blocks: dict[BlockKey, Orphan] = field(factory=dict)
    _children: dict[BlockKey, dict[BlockKey, None]] = field(factory=dict)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[tuple[BlockKey, Orphan]]:
        """Oldest first."""
        return iter(self._blocks.items())

    def add(self, key: BlockKey, parent: BlockKey, local_hash: int, tier: Tier) -> None:
        known = self._blocks.get(key)
        if known is None or known.parent != parent or known.local_hash != local_hash:
            self._forget(key)
            known = self._blocks[key] = Orphan(parent, local_hash)
            self._children.setdefault(parent, {})[key] = None
        known.tiers.add(tier)
        while len(self._blocks) > self.limit:
            self._forget(next(iter(self._blocks)))
            self.dropped += 1

    def take(self, parent: BlockKey) -> list[tuple[BlockKey, Orphan]]:
        """The blocks that waited for ``parent``; they wait no longer."""
        return [(key, self._blocks.pop(key)) for key in self._children.pop(parent, ())]

    def discard(self, key: BlockKey, tier: Tier) -> bool:
        """The block left ``tier``, or has found its place there. False if it did not wait."""
        known = self._blocks.get(key)
        if known is None or tier not in known.tiers:
            return False
        known.tiers.discard(tier)
        if not known.tiers:
            self._forget(key)
        return True

    def clear(self) -> None:
        self._blocks.clear()
        self._children.clear()

    def _forget(self, key: BlockKey) -> None:
        known = self._blocks.pop(key, None)
        if known is not None:
            siblings = self._children[known.parent]
            del siblings[key]
            if not siblings:
                del self._children[known.parent]
