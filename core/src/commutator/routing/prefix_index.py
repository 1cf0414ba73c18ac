"""Which prefix every worker holds, from the KV events that engines publish. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import asdict, frozen

from commutator.kv.events import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from commutator.kv.hashing import hash_root, local_block_hashes
from commutator.kv.medium import Tier, tier_of
from commutator.routing.index_snapshot import (
    IndexFormat,
    RankSnapshot,
    rank_from_snapshot,
    rank_to_snapshot,
)
from commutator.routing.orphans import BlockKey, Orphans
from commutator.routing.overlap import Overlap, WorkerRank, on_device
from commutator.routing.prefix_map import PrefixMap, slots_of
from commutator.routing.rank_blocks import RankBlocks

__all__ = ["IndexStatistics", "PrefixIndex", "RankStatistics"]

_MEMBERS_KEPT = 1024


@frozen
class RankStatistics:
    """What one data-parallel rank holds, and what its events were like."""

    blocks: tuple[int, ...]
    """For each tier, fastest first."""
    orphans: int
    orphans_dropped: int
    block_sizes: tuple[int, ...]
    """Tokens in the engine's blocks, by its events; tiers may differ."""
    unknown_media: tuple[str, ...]
    """Media of its events that are no tier we know; counted as external."""
    counters: dict[str, int]
    """The fields of ``RankCounters``."""


@frozen
class IndexStatistics:
    """The size of the index."""

    blocks: int
    """Distinct blocks that at least one rank holds."""
    holder_sets: int
    ranks: int
    orphans: int


class PrefixIndex:
    """The prefix index of one model: blocks of ``block_size`` tokens on any number of workers.

    Events may come in any order. Blocks are known by their tokens; an engine's own names for them
    only tell its blocks apart. An engine's block may be a multiple of ours; blocks of any other
    size are counted as unusable and not indexed. Of models with several kinds of attention, the
    layers that keep whole prefixes are followed. Memory grows with what the engines hold, plus
    ``max_orphans`` blocks a rank whose parents are unknown.
    """

    def __init__(self, block_size: int, *, max_orphans: int = 8192) -> None:
        self.block_size = block_size
        self.format = IndexFormat.of(block_size)
        self._max_orphans = max_orphans
        self._map = PrefixMap()
        self._ranks: dict[WorkerRank, RankBlocks] = {}
        self._slots: list[WorkerRank | None] = []
        self._members: dict[int, tuple[WorkerRank, ...]] = {}

    def apply(self, worker_id: str, event: KvEvent, rank: int = 0) -> None:
        """Take one event of a worker into account."""
        blocks = self._rank(WorkerRank(worker_id, rank))
        match event:
            case BlockStored():
                self._stored(blocks, event)
            case BlockRemoved() if _is_followed(blocks, event.group):
                tier = _tier(blocks, event.medium)
                blocks.remove(tier, blocks.keys_of(event.block_hashes, tier))
            case BlocksCleared():
                blocks.counters.cleared += 1
                blocks.clear()

    def store(
        self,
        worker_id: str,
        sequence_hashes: Sequence[int],
        *,
        rank: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """A worker holds these blocks; for callers that know the hashes and need no events."""
        self._rank(WorkerRank(worker_id, rank)).hold(tier, sequence_hashes, sequence_hashes)

    def remove(
        self,
        worker_id: str,
        sequence_hashes: Sequence[int],
        *,
        rank: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """The inverse of ``store``."""
        self._rank(WorkerRank(worker_id, rank)).remove(tier, sequence_hashes)

    def match(self, sequence_hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """What each rank holds of a prompt; ranks that hold nothing of it are left out."""
        ended, lower = self._map.match(sequence_hashes)
        result: dict[WorkerRank, Overlap] = {}
        for slots, blocks in ended:
            overlap = on_device(blocks)
            for member in self._members_of(slots):
                result[member] = overlap
        for slot, (_, host, disk, external) in lower.items():
            owner = self._slots[slot]
            assert owner is not None
            device = result[owner].device - host - disk - external
            result[owner] = Overlap(device, host, disk, external)
        return result

    def holds(self, worker_id: str, sequence_hash: int) -> bool:
        """Whether any rank of the worker has this block in any tier."""
        holders = self._map.holders(sequence_hash)
        if holders is None:
            return False
        return any(member.worker_id == worker_id for member in self._members_of(holders.all))

    def reset_worker(self, worker_id: str, rank: int | None = None) -> None:
        """The engine (or one rank of it) began anew: its blocks are gone."""
        for member, blocks in self._ranks.items():
            if member.worker_id == worker_id and rank in (None, member.rank):
                blocks.clear()

    def remove_worker(self, worker_id: str) -> None:
        """The worker is gone, and all that was known of it."""
        for member in [m for m in self._ranks if m.worker_id == worker_id]:
            blocks = self._ranks.pop(member)
            blocks.clear()
            self._slots[blocks.slot] = None
        self._members.clear()

    def ranks(self) -> list[WorkerRank]:
        """Every rank that an event came from."""
        return list(self._ranks)

    def statistics(self) -> IndexStatistics:
        orphans = sum(len(blocks.orphans) for blocks in self._ranks.values())
        return IndexStatistics(len(self._map), self._map.distinct_sets, len(self._ranks), orphans)

    def blocks_by_worker(self) -> dict[str, tuple[int, ...]]:
        """How many blocks all ranks of a worker hold together: for each tier, fastest first."""
        found: dict[str, tuple[int, ...]] = {}
        for member, blocks in self._ranks.items():
            before = found.get(member.worker_id, (0,) * len(Tier))
            held = zip(before, map(len, blocks.held), strict=True)
            found[member.worker_id] = tuple(map(sum, held))
        return found

    def rank_statistics(self, worker_id: str) -> dict[int, RankStatistics]:
        """By rank; empty for a worker that no event came from."""
        return {
            member.rank: RankStatistics(
                blocks=tuple(len(held) for held in blocks.held),
                orphans=len(blocks.orphans),
                orphans_dropped=blocks.orphans.dropped,
                block_sizes=tuple(sorted(blocks.block_sizes)),
                unknown_media=tuple(sorted(blocks.unknown_media)),
                counters=asdict(blocks.counters),
            )
            for member, blocks in self._ranks.items()
            if member.worker_id == worker_id
        }

    def snapshot(self, worker_id: str) -> list[RankSnapshot]:
        """What is known of a worker, as plain values for MessagePack; see ``restore``."""
        return [
            rank_to_snapshot(member.rank, blocks)
            for member, blocks in self._ranks.items()
            if member.worker_id == worker_id
        ]

    def restore(self, worker_id: str, ranks: Iterable[RankSnapshot]) -> None:
        """Replace what is known of a worker by a snapshot of an index with an equal ``format``."""
        self.remove_worker(worker_id)
        for state in ranks:
            rank_from_snapshot(self._rank(WorkerRank(worker_id, state.rank)), state)

    def _stored(self, blocks: RankBlocks, event: BlockStored) -> None:
        if not event.keeps_prefix or not _is_followed(blocks, event.group):
            blocks.counters.other_groups += len(event.block_hashes)
            return
        if event.group is not None:
            blocks.group = event.group
        tier = _tier(blocks, event.medium)
        if not event.token_ids:  # vLLM's offloading connector then tells no block size either
            blocks.store_known(tier, blocks.keys_of(event.block_hashes, tier))
            return
        blocks.block_sizes.add(event.block_size)
        parts, rest = divmod(event.block_size, self.block_size)
        if rest or not parts:
            blocks.counters.unusable += len(event.block_hashes)
            return
        blocks.most_parts = max(blocks.most_parts, parts)
        keys = _parts(event.block_hashes, parts)
        if len(event.token_ids) != len(keys) * self.block_size:
            blocks.counters.malformed += len(event.block_hashes)
            return
        local = local_block_hashes(event.token_ids, self.block_size, lora_name=event.lora_name)
        before = event.parent_block_hash
        parent = None if before is None else blocks.last_key_of(before, parts)
        blocks.store(tier, keys, local, parent, hash_root(event.cache_salt))

    def _rank(self, member: WorkerRank) -> RankBlocks:
        known = self._ranks.get(member)
        if known is None:
            try:
                slot = self._slots.index(None)
                self._slots[slot] = member
            except ValueError:
                slot = len(self._slots)
                self._slots.append(member)
            known = RankBlocks(slot, self._map, Orphans(self._max_orphans))
            self._ranks[member] = known
        return known

    def _members_of(self, slots: int) -> tuple[WorkerRank, ...]:
        known = self._members.get(slots)
        if known is None:
            if len(self._members) >= _MEMBERS_KEPT:
                self._members.clear()
            names = (self._slots[slot] for slot in slots_of(slots))
            known = self._members[slots] = tuple(name for name in names if name is not None)
        return known


def _is_followed(blocks: RankBlocks, group: int | None) -> bool:
    """Groups of layers give equal tokens the same name, so that only one can be followed."""
    return None in {blocks.group, group} or blocks.group == group


def _parts(hashes: Iterable[int | bytes], parts: int) -> Sequence[BlockKey]:
    if parts == 1:
        return tuple(hashes)
    return [(name, part) for name in hashes for part in range(parts)]


def _tier(blocks: RankBlocks, medium: str | None) -> Tier:
    tier = tier_of(medium)
    if tier is None:
        blocks.unknown_media.add(str(medium))
        return Tier.EXTERNAL
    return tier
