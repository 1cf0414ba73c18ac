"""Which tiers have each block, and the two-phase steps from one state to the next.

    nowhere --stage--> staged --publish--> published --unpublish--> nowhere
                         |                                 |           ^
                         +--unstage--> nowhere             +--(pinned: evicting until unpinned)

Only published blocks can be loaded. Each step updates the tier's block pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeVar

from attrs import define

from commutator.contract.block import PLAIN, BlockDescriptor, BlockKey, RetentionHints
from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.block_manager.actions import (
    TO_MAKE_ROOM,
    Action,
    Announce,
    FreeBlocks,
)
from commutator_engine_kit.kv.block_manager.block_pool import TierBlockPool, count


@define(slots=True)
class Node:
    """One block. Each tier is a bit: 1 for the first, 2 for the second, ..."""

    offer: BlockDescriptor
    """Its key, its parent's key, its tokens."""
    published: int = 0
    staged: int = 0
    evicting: int = 0
    loaded: bool = False
    """Whether a load was counted as the use that the next offer reports."""


ValueT = TypeVar("ValueT")


class Recent(Generic[ValueT]):
    """A value for each of the ``most`` blocks that were noted last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[BlockKey, ValueT] = OrderedDict()

    def note(self, key: BlockKey, value: ValueT) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def of(self, key: BlockKey) -> ValueT | None:
        return self._values.get(key)


class UseCounts(Recent[int]):
    """The number of uses of each block that it remembers."""

    def used(self, key: BlockKey) -> None:
        self.note(key, self[key] + 1)

    def __getitem__(self, key: BlockKey) -> int:
        return self.of(key) or 0


def _offer_of(block: StoredBlock) -> BlockDescriptor:
    """The descriptor of a block that an earlier process stored; its retention is lost."""
    return BlockDescriptor(
        key=block.key,
        parent=block.parent,
        token_ids=block.token_ids,
        facts=PLAIN if block.tenant is None else RetentionHints(tenant=block.tenant),
        adapter=block.adapter,
    )


class BlockIndex:
    """Every block that is stored in a tier, or on its way to one."""

    def __init__(self, pools: Sequence[TierBlockPool], remembered_fates: int) -> None:
        self.pools = pools
        self.nodes: dict[BlockKey, Node] = {}
        self.up = (1 << len(pools)) - 1
        """Bits of the tiers that can be read."""
        self.fates = Recent[str](remembered_fates)
        """Why the blocks that were refused or removed last are in no tier, as text."""

    def match(self, keys: Sequence[BlockKey], first: int = 0) -> list[int]:
        """The fastest tier of each of the consecutive keys from ``first`` on."""
        nodes, up = self.nodes, self.up
        found: list[int] = []
        for position in range(first, len(keys)):
            node = nodes.get(keys[position])
            if node is None:
                break
            tiers = node.published & up
            if not tiers:
                break
            found.append((tiers & -tiers).bit_length() - 1)
        return found

    def holders(self, keys: Iterable[BlockKey]) -> list[int | None]:
        """The fastest tier of each block; None for one that no tier can load now."""
        nodes, up = self.nodes, self.up
        found: list[int | None] = []
        for key in keys:
            node = nodes.get(key)
            tiers = 0 if node is None else node.published & up
            found.append((tiers & -tiers).bit_length() - 1 if tiers else None)
        return found

    def is_published(self, pool: TierBlockPool, key: BlockKey) -> bool:
        node = self.nodes.get(key)
        return node is not None and bool(node.published & pool.bit)

    def presence(self, pool: TierBlockPool, key: BlockKey) -> str | None:
        """Why the tier needs no copy of the block, or None."""
        node = self.nodes.get(key)
        if node is not None:
            if node.published & pool.bit:
                return "present"
            if node.staged & pool.bit:
                return "being stored"
            if node.evicting & pool.bit:
                return "leaving"
        return "being stored" if key in pool.waiting else None

    def take_loaded(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Those of the blocks whose use was counted when they were loaded; clears the mark."""
        loaded: set[BlockKey] = set()
        for key in keys:
            node = self.nodes.get(key)
            if node is not None and node.loaded:
                node.loaded = False
                loaded.add(key)
        return loaded

    def unknown(self, pool: TierBlockPool, blocks: Iterable[StoredBlock]) -> list[BlockDescriptor]:
        """Those of a tier's blocks that are not in its pool, each once."""
        new: dict[BlockKey, BlockDescriptor] = {}
        for block in blocks:
            key = block.key
            if key not in new and self.presence(pool, key) is None:
                node = self.nodes.get(key)
                new[key] = _offer_of(block) if node is None else node.offer
        return list(new.values())

    def stage(self, pool: TierBlockPool, offers: Iterable[BlockDescriptor]) -> None:
        """Take room for blocks to be written."""
        for offer in offers:
            node = self.nodes.get(offer.key)
            if node is None:
                node = self.nodes[offer.key] = Node(offer)
            node.staged |= pool.bit
            pool.staged += 1

    def unstage(self, pool: TierBlockPool, key: BlockKey) -> None:
        """Release the room of a block that was not written, or must not be published."""
        node = self.nodes[key]
        node.staged &= ~pool.bit
        pool.staged -= 1
        pool.quota.gone(key)
        pool.cancelled.discard(key)
        self._drop_if_nowhere(node)

    def publish(
        self, pool: TierBlockPool, offers: Sequence[BlockDescriptor], now_s: float
    ) -> list[Action]:
        """Make blocks loadable that are staged, or were found in the tier."""
        published: list[BlockDescriptor] = []
        # Backwards, so that a policy by recency evicts a chain from its end.
        for offer in reversed(offers):
            node = self.nodes.get(offer.key)
            if node is None:
                node = self.nodes[offer.key] = Node(offer)
            if node.staged & pool.bit:
                node.staged &= ~pool.bit
                pool.staged -= 1
            else:
                pool.quota.claim(offer.key, offer.facts.tenant)
            node.published |= pool.bit
            pool.published += 1
            pool.quota.stored(offer.key)
            pool.retention.added(offer.key, offer.parent, offer.facts, now_s)
            published.append(node.offer)
        return self._announce("stored", pool, published[::-1])

    def unpublish(
        self, pool: TierBlockPool, keys: Iterable[BlockKey], reason: str, *, free: bool = True
    ) -> list[Action]:
        """Remove published blocks from the index, and free those without readers.

        ``free=False``: the tier no longer has them.
        """
        removed: list[BlockDescriptor] = []
        freed: list[BlockKey] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None or not node.published & pool.bit:
                continue
            node.published &= ~pool.bit
            pool.published -= 1
            pool.retention.removed(key, evicted=reason in TO_MAKE_ROOM)
            pool.quota.gone(key)
            if key in pool.prefetched:
                pool.prefetched.remove(key)
                count(pool.counts.prefetched, "unused")
            removed.append(node.offer)
            if free and key in pool.pins:
                node.evicting |= pool.bit
                pool.leaving[key] = reason
            else:
                if free:
                    freed.append(key)
                self._drop_if_nowhere(node)
            self.fates.note(key, f"{reason} ({pool.spec.name})")
        count(pool.counts.removed, reason, len(removed))
        return self._announce("removed", pool, removed) + self._free(pool, freed, reason)

    def unpin(self, pool: TierBlockPool, keys: Iterable[BlockKey]) -> list[Action]:
        """Readers ended. Frees removed blocks that have no other reader."""
        freed: dict[str, list[BlockKey]] = {}
        for key in keys:
            if not pool.unpin(key):
                continue
            node = self.nodes.get(key)
            if node is not None and node.evicting & pool.bit:
                node.evicting &= ~pool.bit
                freed.setdefault(pool.leaving.pop(key), []).append(key)
                self._drop_if_nowhere(node)
        return [
            action for reason, those in freed.items() for action in self._free(pool, those, reason)
        ]

    def _drop_if_nowhere(self, node: Node) -> None:
        if not node.published | node.staged | node.evicting:
            del self.nodes[node.offer.key]

    @staticmethod
    def _announce(
        what: Literal["stored", "removed"], pool: TierBlockPool, blocks: Sequence[BlockDescriptor]
    ) -> list[Action]:
        medium, those = pool.spec.medium, tuple(blocks)
        return [Announce(what=what, tier=pool.number, medium=medium, blocks=those)] if those else []

    @staticmethod
    def _free(pool: TierBlockPool, keys: Sequence[BlockKey], reason: str) -> list[Action]:
        return [FreeBlocks(tier=pool.number, keys=tuple(keys), reason=reason)] if keys else []
