"""Which prefix each data-parallel rank holds, from KV events. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import add

from attrs import define, evolve, field, frozen

from commutator.contract.block import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    CacheLevel,
    KvEvent,
    cache_level,
)
from commutator.contract.routing import Overlap, WorkerRank, on_device
from commutator.routing.prefix_index.hashing import chain_hashes, hash_root, local_block_hashes
from commutator.routing.prefix_index.prefix_map import LayerGroup, PrefixMap, PrefixMatch, slots_of

_MAX_MEMBER_SETS = 1024
_MOST_BLOCK_TOKENS = 1 << 14
_MOST_BLOCK_SIZES = _MOST_GROUPS = 16
_MOST_UNKNOWN_MEDIA = 16
_MEDIUM_CHARS = 64
_SLICE_BLOCKS = 2048
"""Blocks that one slice of a removal takes out: about a millisecond."""


@frozen
class IndexStatistics:
    """The size of the index."""

    blocks: int
    """Distinct blocks, each held by at least one rank."""
    ranks: int
    orphans: int


EngineBlockHash = int | bytes | tuple[int | bytes, int]
"""An engine's hash of a block; with the number of the part where its block has several of ours."""


@define
class Orphan:
    """A block whose parent is unknown, so that it has no place in a sequence."""

    parent: EngineBlockHash
    local_hash: int
    tiers: set[CacheLevel] = field(factory=set)


@define(eq=False)
class Orphans:
    """Orphaned blocks, at most ``limit``; the oldest are dropped first."""

    limit: int
    dropped: int = 0
    """Blocks that were dropped because there were too many."""
    _blocks: dict[EngineBlockHash, Orphan] = field(factory=dict)
    _children: dict[EngineBlockHash, dict[EngineBlockHash, None]] = field(factory=dict)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: EngineBlockHash) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[tuple[EngineBlockHash, Orphan]]:
        """Oldest first."""
        return iter(self._blocks.items())

    def add(
        self, key: EngineBlockHash, parent: EngineBlockHash, local_hash: int, tier: CacheLevel
    ) -> None:
        known = self._blocks.get(key)
        if known is None or known.parent != parent or known.local_hash != local_hash:
            self._forget(key)
            known = self._blocks[key] = Orphan(parent, local_hash)
            self._children.setdefault(parent, {})[key] = None
        known.tiers.add(tier)
        while len(self._blocks) > self.limit:
            self._forget(next(iter(self._blocks)))
            self.dropped += 1

    def take(self, parent: EngineBlockHash) -> list[tuple[EngineBlockHash, Orphan]]:
        """Remove and return the blocks whose parent is ``parent``."""
        return [(key, self._blocks.pop(key)) for key in self._children.pop(parent, ())]

    def discard(self, key: EngineBlockHash, tier: CacheLevel) -> bool:
        """The block left ``tier`` or was placed there. False if it was no orphan there."""
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

    def _forget(self, key: EngineBlockHash) -> None:
        known = self._blocks.pop(key, None)
        if known is not None:
            siblings = self._children[known.parent]
            del siblings[key]
            if not siblings:
                del self._children[known.parent]


@define
class RankCounters:
    """What was wrong with a rank's events, in blocks, since the rank was first seen."""

    untraceable: int = 0
    """Stored without tokens, under an unknown hash."""
    malformed: int = 0
    """Stored with a number of tokens that does not match the number of blocks."""
    unusable: int = 0
    """Stored with a block size that is no multiple of ours."""
    other_groups: int = 0
    """Stored by layers that keep whole prefixes and are not followed."""


@frozen
class RankSnapshot:
    """What one data-parallel rank holds, as plain values for MessagePack."""

    rank: int
    block_sizes: list[int]
    group: int | None
    unknown_media: list[str]
    counters: RankCounters
    held: dict[CacheLevel, dict[EngineBlockHash, int]]
    """For each cache level: engine's block hash to sequence hash."""
    orphans: list[tuple[EngineBlockHash, EngineBlockHash, int, list[CacheLevel]]]
    """Block hash, parent, local hash and cache levels of each, oldest first."""
    orphans_dropped: int = 0
    others: list[tuple[int, int, bool, int, dict[EngineBlockHash, int]]] = field(factory=list)
    """Groups with windows or states: number, window, whether chunked, block size, blocks held."""


@define(eq=False)
class RankBlocks:
    """Translates one rank's block hashes into sequence hashes, and updates the shared map."""

    slot: int
    block_size: int
    """Tokens in one of our blocks."""
    map: PrefixMap
    orphans: Orphans
    held: tuple[dict[EngineBlockHash, int], ...] = field(
        factory=lambda: tuple({} for _ in CacheLevel)
    )
    """For each cache level: engine's block hash to sequence hash."""
    counters: RankCounters = field(factory=RankCounters)
    block_sizes: set[int] = field(factory=set)
    """Tokens in the engine's own blocks; sizes may differ between cache levels."""
    group: int | None = None
    """The group of layers that is followed: the first one that keeps whole prefixes."""
    unknown_media: set[str] = field(factory=set)
    """Media of its events that are no known cache level; counted as external."""
    others: dict[int, tuple[LayerGroup, RankBlocks]] = field(factory=dict)
    """Groups with windows or states, by number: blocks on the device, by the followed names."""
    waiting: dict[EngineBlockHash, None] = field(factory=dict)
    """Of such a group: what was stored before the followed group's block of the same name."""
    _names: Counter[tuple[CacheLevel, int]] = field(factory=Counter)
    """Further hashes of a block: engines may hash equal tokens differently."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of held blocks for each cache level, fastest first."""
        return tuple(map(len, self.held))

    def hash_of(self, key: EngineBlockHash) -> int | None:
        """The sequence hash of a held block."""
        for held in self.held:
            if (found := held.get(key)) is not None:
                return found
        return None

    def take_size(self, tokens: int) -> bool:
        """Note a size of the engine's blocks. False for one too large, or one too many."""
        if tokens in self.block_sizes:
            return True
        if tokens > _MOST_BLOCK_TOKENS or len(self.block_sizes) >= _MOST_BLOCK_SIZES:
            return False
        self.block_sizes.add(tokens)
        return True

    @property
    def most_parts(self) -> int:
        """Our blocks in the engine's largest block whose size is a multiple of ours."""
        if len(self.block_sizes) == 1 and self.block_size in self.block_sizes:
            return 1  # as nearly always
        parts = (divmod(size, self.block_size) for size in self.block_sizes)
        return max([1, *(whole for whole, rest in parts if not rest)])

    def keys_of(self, names: Sequence[int | bytes], tier: CacheLevel) -> Sequence[EngineBlockHash]:
        """Our blocks in the engine's ``names``: those held in ``tier``, or else anywhere."""
        if (most := self.most_parts) == 1:
            return names
        keys: list[EngineBlockHash] = []
        for name in names:
            parts = [(name, part) for part in range(most)]
            if name in self.held[tier]:
                keys.append(name)
            elif found := [key for key in parts if key in self.held[tier]]:
                keys += found
            else:
                keys += [key for key in parts if self._knows(key)] or [name]
        return keys

    def last_key_of(self, name: int | bytes, parts: int) -> EngineBlockHash:
        """Our last block in the engine's ``name``, which has ``parts`` of ours as a rule."""
        expected: EngineBlockHash = name if parts == 1 else (name, parts - 1)
        if (most := self.most_parts) == 1 or self._knows(expected):
            return expected
        others = (name, *((name, part) for part in reversed(range(most))))
        return next((key for key in others if self._knows(key)), expected)

    def _knows(self, key: EngineBlockHash) -> bool:
        return key in self.orphans or self.hash_of(key) is not None

    def store(
        self,
        tier: CacheLevel,
        keys: Sequence[EngineBlockHash],
        local_hashes: Sequence[int],
        parent: EngineBlockHash | None,
        root: int | None = None,
    ) -> None:
        """Store consecutive blocks, the first after ``parent`` or, without one, ``root``."""
        parent_hash = root if parent is None else self.hash_of(parent)
        if parent is None or parent_hash is not None:
            self.hold(tier, keys, chain_hashes(local_hashes, parent_hash))
            return
        for number, key in enumerate(keys):
            if (known := self.hash_of(key)) is not None:  # held in another level
                rest = [known, *chain_hashes(local_hashes[number + 1 :], known)]
                self.hold(tier, keys[number:], rest)
                return
            self.orphans.add(key, parent, local_hashes[number], tier)
            parent = key

    def store_known(self, tier: CacheLevel, keys: Iterable[EngineBlockHash]) -> None:
        """Store blocks without tokens: those held in another level are known by their hash."""
        for key in keys:
            if (known := self.hash_of(key)) is None:
                self.counters.untraceable += 1
            else:
                self.hold(tier, (key,), (known,))

    def hold(
        self, tier: CacheLevel, keys: Sequence[EngineBlockHash], hashes: Sequence[int]
    ) -> None:
        """Store blocks with known sequence hashes, and adopt their orphans."""
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
                parents.append(key)

    def store_beside(self, followed: RankBlocks, keys: Iterable[EngineBlockHash]) -> None:
        """Store blocks of a window or state on the device."""
        for key in keys:
            if (known := followed.hash_of(key)) is not None:
                self._hold(CacheLevel.DEVICE, (key,), (known,))
            elif len(self.waiting) < followed.orphans.limit:
                self.waiting[key] = None

    def remove(self, tier: CacheLevel, keys: Iterable[EngineBlockHash]) -> None:
        """Remove blocks from ``tier``, as far as they are there."""
        held = self.held[tier]
        gone: list[int] = []
        for key in keys:
            known = held.pop(key, None)
            if known is not None:
                gone.append(known)
            elif key in self.waiting:
                del self.waiting[key]
            else:
                self.orphans.discard(key, tier)
        self._release(tier, gone)

    def clear(self) -> None:
        """Remove all blocks from all levels."""
        for _ in self.clearing():
            pass

    def clearing(self) -> Iterator[None]:
        """``clear`` in slices, one for each step of the iterator. No event may come meanwhile."""
        self.orphans.clear()
        self.waiting.clear()
        for _, other in self.others.values():
            yield from other.clearing()
        for tier in CacheLevel:
            held = self.held[tier]
            while held:
                last = [held.popitem()[1] for _ in range(min(len(held), _SLICE_BLOCKS))]
                self._release(tier, last)
                yield

    def snapshot(self, rank: int) -> RankSnapshot:
        """A copy of everything; ``rank`` is its own number."""
        return RankSnapshot(
            rank=rank,
            block_sizes=sorted(self.block_sizes),
            group=self.group,
            unknown_media=sorted(self.unknown_media),
            counters=evolve(self.counters),
            held={level: dict(self.held[level]) for level in CacheLevel if self.held[level]},
            orphans=[
                (key, orphan.parent, orphan.local_hash, sorted(orphan.tiers))
                for key, orphan in self.orphans
            ],
            orphans_dropped=self.orphans.dropped,
            others=[
                (number, group.window, group.chunked, group.step * self.block_size, dict(held))
                for number, (group, other) in self.others.items()
                for held in other.held[:1]
            ],
        )

    def restore(self, state: RankSnapshot) -> None:
        """Take a snapshot over; before any event."""
        self.block_sizes = set(state.block_sizes)
        self.group = state.group
        self.unknown_media = set(state.unknown_media)
        for level, held in state.held.items():
            self.hold(level, tuple(held), tuple(held.values()))
        for key, parent, local_hash, levels in state.orphans:
            for level in levels:
                self.orphans.add(key, parent, local_hash, level)
        self.orphans.dropped = state.orphans_dropped
        self.counters = evolve(state.counters)

    def _hold(
        self, tier: CacheLevel, keys: Sequence[EngineBlockHash], hashes: Sequence[int]
    ) -> None:
        held = self.held[tier]
        for _, other in self.others.values():
            for key in other.waiting.keys() & keys if other.waiting else ():
                del other.waiting[key]
                other.hold(CacheLevel.DEVICE, (key,), (hashes[keys.index(key)],))
        if held.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            held.update(zip(keys, hashes, strict=True))
            self._enter(tier, hashes)
            return
        for key, sequence_hash in zip(keys, hashes, strict=True):
            known = held.get(key)
            if known == sequence_hash:
                continue
            if known is not None:  # the engine reused the hash for other tokens
                self._release(tier, (known,))
            held[key] = sequence_hash
            self._enter(tier, (sequence_hash,))

    def _enter(self, tier: CacheLevel, hashes: Iterable[int]) -> None:
        for repeated in self.map.add(self.slot, tier, hashes):
            self._names[tier, repeated] += 1

    def _release(self, tier: CacheLevel, hashes: Iterable[int]) -> None:
        """Remove one hash of each block; a block without any is not held any more."""
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


class PrefixIndex:
    """The prefix index of one model: blocks of ``block_size`` tokens on any number of workers.

    Events may arrive in any order. Blocks are identified by their tokens; an engine's own hashes
    only distinguish its blocks. An engine's block may be a multiple of ours; blocks of other sizes
    are counted as unusable and not indexed. For models with several kinds of attention, the layers
    that keep whole prefixes are followed; a prefix counts as far as those with windows or states
    can go on after it. Memory grows with the blocks that engines hold, plus few orphans.
    """

    def __init__(self, block_size: int, *, max_orphans: int = 8192) -> None:
        self.block_size = block_size
        self._max_orphans = max_orphans
        self._map = PrefixMap()
        self._ranks: dict[WorkerRank, RankBlocks] = {}
        self._slots: list[WorkerRank | None] = []
        self._free: list[int] = []
        """Slots without a rank and without blocks, as a heap."""
        self._by_worker: dict[str, dict[int, int]] = {}
        """The slot of each rank of each worker."""
        self._groups: dict[tuple[int, int, bool, int], LayerGroup] = {}
        """Layers with windows or states: by group, window, whether chunked, and block size."""
        self._members: dict[int, tuple[WorkerRank, ...]] = {}
        self.layout = 0
        """Changes whenever a slot is taken from its rank."""

    @property
    def has_lower(self) -> bool:
        """Whether any block has ever been in a tier below the device."""
        return self._map.has_lower

    def apply(self, worker_id: str, event: KvEvent, rank: int = 0) -> None:
        """Apply one event of a worker."""
        blocks = self._rank(WorkerRank(worker_id, rank))
        match event:
            case BlockStored():
                self._stored(blocks, event)
            case BlockRemoved() if event.group is not None and event.group in blocks.others:
                if _tier(blocks, event.medium) is CacheLevel.DEVICE:
                    group, other = blocks.others[event.group]
                    other.remove(CacheLevel.DEVICE, _parts(event.block_hashes, group.step))
            case BlockRemoved() if _is_followed(blocks, event.group):
                tier = _tier(blocks, event.medium)
                blocks.remove(tier, blocks.keys_of(event.block_hashes, tier))
            case BlocksCleared():
                blocks.clear()

    def store(
        self,
        worker_id: str,
        sequence_hashes: Sequence[int],
        *,
        rank: int = 0,
        tier: CacheLevel = CacheLevel.DEVICE,
    ) -> None:
        """Store blocks by their sequence hashes, without an event."""
        self._rank(WorkerRank(worker_id, rank)).hold(tier, sequence_hashes, sequence_hashes)

    def remove(
        self,
        worker_id: str,
        sequence_hashes: Sequence[int],
        *,
        rank: int = 0,
        tier: CacheLevel = CacheLevel.DEVICE,
    ) -> None:
        """Remove blocks by their sequence hashes, without an event."""
        self._rank(WorkerRank(worker_id, rank)).remove(tier, sequence_hashes)

    def find(self, sequence_hashes: Sequence[int]) -> PrefixMatch:
        """The overlap of each slot with a prompt; see ``slot_of``."""
        return self._map.match(sequence_hashes, self._groups.values())

    def match(self, sequence_hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """The overlap of each rank with a prompt; ranks without overlap are left out."""
        found = self.find(sequence_hashes)
        result: dict[WorkerRank, Overlap] = {}
        for slots, blocks in found.ended():
            result |= dict.fromkeys(self._members_of(slots), on_device(blocks))
        for slot in found.lower:
            if (owner := self._slots[slot]) is not None:
                result[owner] = found.overlap(slot)
        return result

    def slot_of(self, member: WorkerRank) -> int:
        """The rank's number in ``PrefixMatch``, also before its first event.

        It keeps this number until ``layout`` changes.
        """
        slots = self._by_worker.setdefault(member.worker_id, {})
        slot = slots.get(member.rank)
        if slot is None:
            if self._free:
                slot = heapq.heappop(self._free)
                self._slots[slot] = member
            else:
                slot = len(self._slots)
                self._slots.append(member)
            slots[member.rank] = slot
            self._members.clear()
        return slot

    def holds(self, worker_id: str, sequence_hash: int) -> bool:
        """Whether any rank of the worker holds this block in any cache level."""
        holders = self._map.holders(sequence_hash)
        if holders is None:
            return False
        return any(holders.all >> slot & 1 for slot in self._by_worker.get(worker_id, {}).values())

    def reset_worker(self, worker_id: str, rank: int | None = None) -> None:
        """Remove all blocks of a worker, or of one rank: its engine restarted."""
        for number, blocks in self.worker_ranks(worker_id).items():
            if rank in (None, number):
                blocks.clear()

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker. Unknown workers are ignored."""
        for _ in self.detach(worker_id):
            pass

    def detach(self, worker_id: str) -> Iterator[None]:
        """Forget a worker at once, and its blocks in slices, one for each step of the iterator.

        The worker may be added again meanwhile.
        """
        slots = self._by_worker.pop(worker_id, {})
        gone: list[tuple[int, RankBlocks | None]] = []
        for rank, slot in slots.items():
            gone.append((slot, self._ranks.pop(WorkerRank(worker_id, rank), None)))
            self._slots[slot] = None
        if gone:
            self._members.clear()
            self.layout += 1
        return self._free_slots(gone)

    def _free_slots(self, gone: Sequence[tuple[int, RankBlocks | None]]) -> Iterator[None]:
        for slot, blocks in gone:
            if blocks is not None:
                yield from blocks.clearing()
                for group, _ in blocks.others.values():
                    group.slots &= ~(1 << slot)
            # Only now: until its blocks are gone, the slot's bit is set in their holders.
            heapq.heappush(self._free, slot)

    def statistics(self) -> IndexStatistics:
        orphans = sum(len(blocks.orphans) for blocks in self._ranks.values())
        return IndexStatistics(len(self._map), len(self._ranks), orphans)

    def blocks_by_worker(self) -> dict[str, tuple[int, ...]]:
        """Blocks of all ranks of each worker, for each cache level, fastest first."""
        found: dict[str, tuple[int, ...]] = {}
        for member, blocks in self._ranks.items():
            before = found.get(member.worker_id, (0,) * len(CacheLevel))
            found[member.worker_id] = tuple(map(add, before, blocks.sizes))
        return found

    def worker_ranks(self, worker_id: str) -> Mapping[int, RankBlocks]:
        """By rank; empty for a worker that has sent no event."""
        ranks = self._by_worker.get(worker_id, {})
        found = {rank: self._ranks.get(WorkerRank(worker_id, rank)) for rank in ranks}
        return {rank: blocks for rank, blocks in found.items() if blocks is not None}

    def snapshot(self, worker_id: str) -> list[RankSnapshot]:
        """What each rank of a worker holds; see ``restore``."""
        return [blocks.snapshot(rank) for rank, blocks in self.worker_ranks(worker_id).items()]

    def restore(self, worker_id: str, ranks: Iterable[RankSnapshot]) -> None:
        """Replace the blocks of a worker by those of an index of the same block size."""
        self.remove_worker(worker_id)
        for state in ranks:
            blocks = self._rank(WorkerRank(worker_id, state.rank))
            blocks.restore(state)
            for number, window, chunked, size, held in state.others:
                if (other := self._enter_group(blocks, number, window, chunked, size)) is not None:
                    other[1].hold(CacheLevel.DEVICE, tuple(held), tuple(held.values()))

    def _enter_group(
        self, blocks: RankBlocks, number: int, window: int, chunked: bool, size: int
    ) -> tuple[LayerGroup, RankBlocks] | None:
        """A group of a rank with windows or states; None where it cannot be followed."""
        step, rest = divmod(size, self.block_size)
        if rest or not step or len(blocks.others) >= _MOST_GROUPS:
            return None
        if blocks.group == number:  # taken for one that keeps prefixes, before its kind was known
            blocks.clear()
            blocks.group = None
        group = self._groups.setdefault(
            (number, window, chunked, step),
            LayerGroup(window, chunked, self.block_size, step, PrefixMap()),
        )
        group.slots |= 1 << blocks.slot
        other = RankBlocks(blocks.slot, self.block_size, group.map, Orphans(0))
        return blocks.others.setdefault(number, (group, other))

    def _stored(self, blocks: RankBlocks, event: BlockStored) -> None:
        if event.group is not None and (not event.keeps_prefix or event.group in blocks.others):
            found = blocks.others.get(event.group) or self._enter_group(
                blocks, event.group, event.window, event.chunked, event.block_size
            )
            if found is not None and _tier(blocks, event.medium) is CacheLevel.DEVICE:
                group, other = found
                other.store_beside(blocks, _parts(event.block_hashes, group.step))
            return
        if not event.keeps_prefix or not _is_followed(blocks, event.group):
            blocks.counters.other_groups += len(event.block_hashes)
            return
        if event.group is not None:
            blocks.group = event.group
        tier = _tier(blocks, event.medium)
        if not event.token_ids:  # then the event may have no block size either
            blocks.store_known(tier, blocks.keys_of(event.block_hashes, tier))
            return
        # Before anything is made of the size, which may be of any engine's choice.
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            blocks.counters.malformed += len(event.block_hashes)
            return
        parts, rest = divmod(event.block_size, self.block_size)
        if not blocks.take_size(event.block_size) or rest or not parts:
            blocks.counters.unusable += len(event.block_hashes)
            return
        keys = _parts(event.block_hashes, parts)
        local = local_block_hashes(event.token_ids, self.block_size, adapter=event.adapter)
        before = event.parent_block_hash
        parent = None if before is None else blocks.last_key_of(before, parts)
        blocks.store(tier, keys, local, parent, hash_root(event.cache_salt))

    def _rank(self, member: WorkerRank) -> RankBlocks:
        known = self._ranks.get(member)
        if known is None:
            orphans = Orphans(self._max_orphans)
            known = RankBlocks(self.slot_of(member), self.block_size, self._map, orphans)
            self._ranks[member] = known
        return known

    def _members_of(self, slots: int) -> tuple[WorkerRank, ...]:
        known = self._members.get(slots)
        if known is None:
            if len(self._members) >= _MAX_MEMBER_SETS:
                self._members.clear()
            names = (self._slots[slot] for slot in slots_of(slots))
            known = self._members[slots] = tuple(name for name in names if name is not None)
        return known


def _is_followed(blocks: RankBlocks, group: int | None) -> bool:
    """Groups of layers give equal tokens the same hash, so only one group can be followed."""
    return None in {blocks.group, group} or blocks.group == group


def _parts(hashes: Iterable[int | bytes], parts: int) -> Sequence[EngineBlockHash]:
    if parts == 1:
        return tuple(hashes)
    return [(name, part) for name in hashes for part in range(parts)]


_level = lru_cache(64)(cache_level)


def _tier(blocks: RankBlocks, medium: str | None) -> CacheLevel:
    tier = _level(medium if medium is None else medium[:_MEDIUM_CHARS])
    if tier is None:
        if len(blocks.unknown_media) < _MOST_UNKNOWN_MEDIA:
            blocks.unknown_media.add(str(medium)[:_MEDIUM_CHARS])
        return CacheLevel.EXTERNAL
    return tier
