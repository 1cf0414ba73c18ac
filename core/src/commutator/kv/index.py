"""Which block lies in which tiers, and the two-phase steps from one state to the next.

    nowhere --stage--> staged --publish--> published --unpublish--> nowhere
                         |                                 |           ^
                         +--unstage--> nowhere             +--(pinned: evicting until unpinned)

Only published blocks can be loaded. Every step keeps the tier's books.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from attrs import define

from commutator.kv.actions import TO_MAKE_ROOM, Action, Announce, FreeBlocks
from commutator.kv.counters import count
from commutator.kv.keys import BlockKey
from commutator.kv.offer import PLAIN, BlockFacts, Offer
from commutator.kv.tier import Stored
from commutator.kv.tier_book import TierBook

__all__ = ["BlockIndex", "Fates", "Node"]


@define(slots=True)
class Node:
    """One block. Each tier is a bit: 1 for the first, 2 for the second, ..."""

    offer: Offer
    """Its key, its parent's key, its tokens."""
    published: int = 0
    staged: int = 0
    evicting: int = 0
    loaded: bool = False
    """Whether a load counted as the use of which the next offer would tell."""


class Fates:
    """What became of the blocks that were refused or removed last, in words."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fates: OrderedDict[BlockKey, str] = OrderedDict()

    def note(self, key: BlockKey, fate: str) -> None:
        self._fates[key] = fate
        self._fates.move_to_end(key)
        if len(self._fates) > self._most:
            self._fates.popitem(last=False)

    def of(self, key: BlockKey) -> str | None:
        return self._fates.get(key)


def _offer_of(block: Stored) -> Offer:
    """What is known of a block that this process did not store; a restart forgets retention."""
    return Offer(
        key=block.key,
        parent=block.parent,
        token_ids=block.token_ids,
        facts=PLAIN if block.tenant is None else BlockFacts(tenant=block.tenant),
        lora_name=block.lora_name,
    )


class BlockIndex:
    """Every block that lies, or will lie, in any tier."""

    def __init__(self, books: Sequence[TierBook], remembered_fates: int) -> None:
        self.books = books
        self.nodes: dict[BlockKey, Node] = {}
        self.up = (1 << len(books)) - 1
        """The tiers that can be read."""
        self.fates = Fates(remembered_fates)

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

    def is_published(self, book: TierBook, key: BlockKey) -> bool:
        node = self.nodes.get(key)
        return node is not None and bool(node.published & book.bit)

    def presence(self, book: TierBook, key: BlockKey) -> str | None:
        """Why the tier needs no copy of the block, or None."""
        node = self.nodes.get(key)
        if node is not None:
            if node.published & book.bit:
                return "present"
            if node.staged & book.bit:
                return "being stored"
            if node.evicting & book.bit:
                return "leaving"
        return "being stored" if key in book.waiting else None

    def take_loaded(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """The blocks that are used only because they were loaded: that use is counted."""
        loaded: set[BlockKey] = set()
        for key in keys:
            node = self.nodes.get(key)
            if node is not None and node.loaded:
                node.loaded = False
                loaded.add(key)
        return loaded

    def unknown(self, book: TierBook, blocks: Iterable[Stored]) -> list[Offer]:
        """Those of the blocks in a tier that are not in its books, each once."""
        new: dict[BlockKey, Offer] = {}
        for block in blocks:
            key = block.key
            if key not in new and self.presence(book, key) is None:
                node = self.nodes.get(key)
                new[key] = _offer_of(block) if node is None else node.offer
        return list(new.values())

    def stage(self, book: TierBook, offers: Iterable[Offer]) -> None:
        """Take room for blocks that are about to be written."""
        for offer in offers:
            node = self.nodes.get(offer.key)
            if node is None:
                node = self.nodes[offer.key] = Node(offer)
            node.staged |= book.bit
            book.staged += 1

    def unstage(self, book: TierBook, key: BlockKey) -> None:
        """Give back the room of a block that was not written, or must not be published."""
        node = self.nodes[key]
        node.staged &= ~book.bit
        book.staged -= 1
        book.quota.gone(key)
        book.doomed.discard(key)
        self._drop_if_nowhere(node)

    def publish(self, book: TierBook, offers: Sequence[Offer], now_s: float) -> list[Action]:
        """Make blocks loadable that are staged, or that the tier had already."""
        published: list[Offer] = []
        # Backwards: a policy that goes by recency then forgets a chain from its end.
        for offer in reversed(offers):
            node = self.nodes.get(offer.key)
            if node is None:
                node = self.nodes[offer.key] = Node(offer)
            if node.staged & book.bit:
                node.staged &= ~book.bit
                book.staged -= 1
            else:
                book.quota.claim(offer.key, offer.facts.tenant)
            node.published |= book.bit
            book.published += 1
            book.quota.stored(offer.key)
            book.retention.added(offer.key, offer.parent, offer.facts, now_s)
            published.append(node.offer)
        return self._announce("stored", book, published[::-1])

    def unpublish(
        self, book: TierBook, keys: Iterable[BlockKey], reason: str, *, free: bool = True
    ) -> list[Action]:
        """Take published blocks out of the index, and free those that nobody reads.

        ``free=False``: the tier has forgotten them already.
        """
        removed: list[Offer] = []
        freed: list[BlockKey] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None or not node.published & book.bit:
                continue
            node.published &= ~book.bit
            book.published -= 1
            book.retention.removed(key, evicted=reason in TO_MAKE_ROOM)
            book.quota.gone(key)
            if key in book.prefetched:
                book.prefetched.remove(key)
                count(book.counts.prefetched, "unused")
            removed.append(node.offer)
            if free and key in book.pins:
                node.evicting |= book.bit
                book.leaving[key] = reason
            else:
                if free:
                    freed.append(key)
                self._drop_if_nowhere(node)
            self.fates.note(key, f"{reason} ({book.spec.name})")
        count(book.counts.removed, reason, len(removed))
        return self._announce("removed", book, removed) + self._free(book, freed, reason)

    def unpin(self, book: TierBook, keys: Iterable[BlockKey]) -> list[Action]:
        """Readers are done; what was only waiting for them is freed."""
        freed: dict[str, list[BlockKey]] = {}
        for key in keys:
            if not book.unpin(key):
                continue
            node = self.nodes.get(key)
            if node is not None and node.evicting & book.bit:
                node.evicting &= ~book.bit
                freed.setdefault(book.leaving.pop(key), []).append(key)
                self._drop_if_nowhere(node)
        return [
            action for reason, those in freed.items() for action in self._free(book, those, reason)
        ]

    def _drop_if_nowhere(self, node: Node) -> None:
        if not node.published | node.staged | node.evicting:
            del self.nodes[node.offer.key]

    @staticmethod
    def _announce(what: str, book: TierBook, blocks: Sequence[Offer]) -> list[Action]:
        if not blocks:
            return []
        stored = what == "stored"
        return [
            Announce(
                what="stored" if stored else "removed",
                tier=book.number,
                medium=book.spec.medium,
                blocks=tuple(blocks),
            )
        ]

    @staticmethod
    def _free(book: TierBook, keys: Sequence[BlockKey], reason: str) -> list[Action]:
        return [FreeBlocks(tier=book.number, keys=tuple(keys), reason=reason)] if keys else []
