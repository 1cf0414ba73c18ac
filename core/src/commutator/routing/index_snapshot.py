"""What one front door's index knows of a worker, for another one that starts. Pure.

Classes of plain values, which MessagePack takes as they are and checks when they come back.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from commutator.kv.hashing import sequence_hashes
from commutator.kv.medium import Tier
from commutator.routing.event_sequence import Position
from commutator.routing.orphans import BlockKey
from commutator.routing.rank_blocks import RankBlocks, RankCounters

__all__ = [
    "IndexFormat",
    "RankSnapshot",
    "WorkerSnapshot",
    "rank_from_snapshot",
    "rank_to_snapshot",
]

_VERSION = 2


@frozen
class IndexFormat:
    """Indexes with equal ones understand each other's snapshots."""

    block_size: int
    hash_check: int
    """The sequence hash of a block that everybody knows: tells other hashing apart."""
    version: int = _VERSION

    @classmethod
    def of(cls, block_size: int) -> IndexFormat:
        return cls(block_size, sequence_hashes(range(block_size), block_size)[0])


@frozen
class RankSnapshot:
    """What one data-parallel rank holds."""

    rank: int
    block_sizes: list[int]
    most_parts: int
    group: int | None
    unknown_media: list[str]
    counters: RankCounters
    held: dict[Tier, dict[BlockKey, int]]
    """By tier: block name to sequence hash."""
    orphans: list[tuple[BlockKey, BlockKey, int, list[Tier]]]
    """Name, parent, local hash and tiers of each, the oldest first."""
    orphans_dropped: int = 0


@frozen
class WorkerSnapshot:
    """What is known of a worker, and with which messages that knowledge ends."""

    worker_id: str
    messages: int
    """How many have told it."""
    positions: Mapping[str, Position]
    """The last message of each source, by its endpoint."""
    ranks: list[RankSnapshot]

    @property
    def blocks(self) -> int:
        """Held blocks, in all ranks and tiers together."""
        return sum(len(held) for rank in self.ranks for held in rank.held.values())


def rank_to_snapshot(rank: int, blocks: RankBlocks) -> RankSnapshot:
    return RankSnapshot(
        rank=rank,
        block_sizes=sorted(blocks.block_sizes),
        most_parts=blocks.most_parts,
        group=blocks.group,
        unknown_media=sorted(blocks.unknown_media),
        counters=evolve(blocks.counters),
        held={tier: dict(blocks.held[tier]) for tier in Tier if blocks.held[tier]},
        orphans=[
            (key, orphan.parent, orphan.local_hash, sorted(orphan.tiers))
            for key, orphan in blocks.orphans
        ],
        orphans_dropped=blocks.orphans.dropped,
    )


def rank_from_snapshot(blocks: RankBlocks, state: RankSnapshot) -> None:
    """Fill empty ``blocks``."""
    blocks.block_sizes = set(state.block_sizes)
    blocks.most_parts = state.most_parts
    blocks.group = state.group
    blocks.unknown_media = set(state.unknown_media)
    for tier, held in state.held.items():
        blocks.hold(tier, tuple(held), tuple(held.values()))
    for key, parent, local_hash, tiers in state.orphans:
        for tier in tiers:
            blocks.orphans.add(key, parent, local_hash, tier)
    blocks.orphans.dropped = state.orphans_dropped
    blocks.counters = evolve(state.counters)
