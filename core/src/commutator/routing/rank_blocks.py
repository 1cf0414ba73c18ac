"""What one data-parallel rank holds, under the engine's own names for its blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from attrs import define, field

from commutator.kv.hashing import chain_hashes
from commutator.kv.medium import Tier
from commutator.routing.orphans import BlockKey, Orphans
from commutator.routing.prefix_map import PrefixMap

__all__ = ["RankBlocks", "RankCounters"]


@define
class RankCounters:
    """What a rank's events have been like, in blocks, since the rank is known."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    """Events, not blocks."""
    duplicate: int = 0
    """Stored again while they were held."""
    removed_unknown: int = 0
    removed_elsewhere: int = 0
    """Removed from a tier where they were not, while they lie in another."""
    orphaned: int = 0
    adopted: int = 0
    """Orphans whose parent came."""
    untraceable: int = 0
    """Stored without tokens, under a name that is not known."""
    malformed: int = 0
    """Stored with a number of tokens that does not fit the number of blocks."""
    unusable: int = 0
    """Of a block size that ours does not divide."""
    other_groups: int = 0
    """Stored by other layers than those that are followed."""


@define(eq=False)
class RankBlocks:
    """Translates block names into sequence hashes, and keeps the shared map up to date."""

    slot: int
    map: PrefixMap
    orphans: Orphans
    held: tuple[dict[BlockKey, int], ...] = field(factory=lambda: tuple({} for _ in Tier))
    """For each tier: block name to sequence hash."""
    counters: RankCounters = field(factory=RankCounters)
    block_sizes: set[int] = field(factory=set)
    """Tokens in the engine's own blocks; those in one tier may be larger than those in another."""
    most_parts: int = 1
    """How many of our blocks its largest consist of; smaller ones of a name are kept, too."""
    group: int | None = None
    """The group of layers that is followed: the first that keeps whole prefixes."""
    unknown_media: set[str] = field(factory=set)
    _names: Counter[tuple[Tier, int]] = field(factory=Counter)
    """How many further names a block has: engines may name equal tokens differently."""

    def hash_of(self, key: BlockKey) -> int | None:
        """The sequence hash of a held block."""
        for held in self.held:
            if (found := held.get(key)) is not None:
                return found
        return None

    def keys_of(self, names: Sequence[int | bytes], tier: Tier) -> Sequence[BlockKey]:
        """Our blocks in the engine's with these names: those in ``tier``, or else anywhere."""
        if self.most_parts == 1:
            return names
        keys: list[BlockKey] = []
        for name in names:
            parts = [(name, part) for part in range(self.most_parts)]
            if name in self.held[tier]:
                keys.append(name)
            elif found := [key for key in parts if key in self.held[tier]]:
                keys += found
            else:
                keys += [key for key in parts if self._knows(key)] or [name]
        return keys

    def last_key_of(self, name: int | bytes, parts: int) -> BlockKey:
        """Our last block in the engine's ``name``, which mostly has ``parts`` of them."""
        expected: BlockKey = name if parts == 1 else (name, parts - 1)
        if self.most_parts == 1 or self._knows(expected):
            return expected
        others = (name, *((name, part) for part in reversed(range(self.most_parts))))
        return next((key for key in others if self._knows(key)), expected)

    def _knows(self, key: BlockKey) -> bool:
        return key in self.orphans or self.hash_of(key) is not None

    def store(
        self,
        tier: Tier,
        keys: Sequence[BlockKey],
        local_hashes: Sequence[int],
        parent: BlockKey | None,
        root: int | None = None,
    ) -> None:
        """Consecutive blocks, the first of them after ``parent`` or, without one, ``root``."""
        self.counters.stored += len(keys)
        parent_hash = root if parent is None else self.hash_of(parent)
        if parent is None or parent_hash is not None:
            self.hold(tier, keys, chain_hashes(local_hashes, parent_hash))
            return
        for number, key in enumerate(keys):
            if (known := self.hash_of(key)) is not None:  # it lies in another tier
                rest = [known, *chain_hashes(local_hashes[number + 1 :], known)]
                self.hold(tier, keys[number:], rest)
                return
            self.counters.orphaned += 1
            self.orphans.add(key, parent, local_hashes[number], tier)
            parent = key

    def store_known(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Blocks without tokens: those that lie in another tier are known by their name."""
        for key in keys:
            if (known := self.hash_of(key)) is None:
                self.counters.untraceable += 1
            else:
                self.counters.stored += 1
                self.hold(tier, (key,), (known,))

    def hold(self, tier: Tier, keys: Sequence[BlockKey], hashes: Sequence[int]) -> None:
        """Blocks with known sequence hashes; orphans that waited for them are adopted."""
        self._hold(tier, keys, hashes)
        if not self.orphans:
            return
        for key in keys:
            self.orphans.discard(key, tier)
        parents = deque(keys)
        while parents:
            parent = parents.popleft()
            for key, orphan in self.orphans.take(parent):
                linked = chain_hashes((orphan.local_hash,), self.hash_of(parent))
                for held_in in sorted(orphan.tiers):
                    self._hold(held_in, (key,), linked)
                self.counters.adopted += 1
                parents.append(key)

    def remove(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Blocks that left ``tier``. Blocks that never were there are counted, no more."""
        held = self.held[tier]
        gone: list[int] = []
        for key in keys:
            known = held.pop(key, None)
            if known is not None:
                gone.append(known)
            elif not self.orphans.discard(key, tier):
                if self.hash_of(key) is None:
                    self.counters.removed_unknown += 1
                else:
                    self.counters.removed_elsewhere += 1
        self.counters.removed += len(gone)
        self._release(tier, gone)

    def clear(self) -> None:
        """Nothing is held any more, in any tier."""
        for tier in Tier:
            self._release(tier, self.held[tier].values())
            self.held[tier].clear()
        self.orphans.clear()

    def _hold(self, tier: Tier, keys: Sequence[BlockKey], hashes: Sequence[int]) -> None:
        held = self.held[tier]
        if held.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            held.update(zip(keys, hashes, strict=True))
            self._enter(tier, hashes)
            return
        for key, sequence_hash in zip(keys, hashes, strict=True):
            known = held.get(key)
            if known == sequence_hash:
                self.counters.duplicate += 1
                continue
            if known is not None:  # the engine gave the name to other tokens
                self._release(tier, (known,))
            held[key] = sequence_hash
            self._enter(tier, (sequence_hash,))

    def _enter(self, tier: Tier, hashes: Iterable[int]) -> None:
        for repeated in self.map.add(self.slot, tier, hashes):
            self._names[tier, repeated] += 1

    def _release(self, tier: Tier, hashes: Iterable[int]) -> None:
        """Take one name each from these blocks; without any name they are not held."""
        if not self._names:
            self.map.remove(self.slot, tier, hashes)
            return
        for sequence_hash in hashes:
            name = (tier, sequence_hash)
            if name not in self._names:
                self.map.remove(self.slot, tier, (sequence_hash,))
            elif self._names[name] == 1:
                del self._names[name]
            else:
                self._names[name] -= 1
