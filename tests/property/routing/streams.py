"""Random event streams of several engines, and the plainest index that could be meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define, field, frozen
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, CacheLevel, KvEvent
from commutator.contract.routing import Overlap, WorkerRank
from commutator.routing.prefix_index.hashing import sequence_hashes

BLOCK_SIZE = 4
MEDIA = {
    CacheLevel.DEVICE: "GPU",
    CacheLevel.HOST: "CPU",
    CacheLevel.DISK: "DISK",
    CacheLevel.EXTERNAL: "REMOTE",
}

Path = tuple[int, ...]
"""A block and all before it: the branch taken at each step."""

WORKERS = st.builds(WorkerRank, st.sampled_from(["w0", "w1", "w2"]), st.sampled_from([0, 0, 1]))
PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=1, max_size=7).map(tuple)


def engine_hash(member: WorkerRank, path: Path) -> int:
    """What the engine calls the block; each engine has names of its own."""
    return xxh3_64_intdigest(repr((member, path)).encode())


def tokens_of(path: Path) -> tuple[int, ...]:
    """Equal branches give equal tokens at every depth, so only the chain tells them apart."""
    return tuple(100 * branch + position for branch in path for position in range(BLOCK_SIZE))


def hashes_of(path: Path) -> list[int]:
    return sequence_hashes(tokens_of(path), BLOCK_SIZE)


@frozen
class Stored:
    """The blocks of ``path`` from number ``start`` on."""

    member: WorkerRank
    path: Path
    start: int
    tier: CacheLevel = CacheLevel.DEVICE

    @property
    def blocks(self) -> list[Path]:
        return [self.path[: end + 1] for end in range(self.start, len(self.path))]

    def event(self) -> KvEvent:
        parent = self.path[: self.start]
        return BlockStored(
            block_hashes=tuple(engine_hash(self.member, block) for block in self.blocks),
            parent_block_hash=engine_hash(self.member, parent) if parent else None,
            token_ids=tokens_of(self.path[self.start :]),
            block_size=BLOCK_SIZE,
            medium=MEDIA[self.tier],
        )


@frozen
class Removed:
    member: WorkerRank
    blocks: tuple[Path, ...]
    tier: CacheLevel = CacheLevel.DEVICE

    def event(self) -> KvEvent:
        hashes = tuple(engine_hash(self.member, block) for block in self.blocks)
        return BlockRemoved(block_hashes=hashes, medium=MEDIA[self.tier])


@frozen
class Cleared:
    member: WorkerRank

    def event(self) -> KvEvent:
        return BlocksCleared()


Step = Stored | Removed | Cleared


def steps(tiers: Sequence[CacheLevel] = tuple(CacheLevel)) -> st.SearchStrategy[Step]:
    """One event of any engine, whatever was before: also orphans, duplicates and the unknown."""
    starts = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5])
    stored = st.tuples(WORKERS, PATHS, starts, st.sampled_from(tiers)).map(
        lambda drawn: Stored(drawn[0], drawn[1], min(drawn[2], len(drawn[1]) - 1), drawn[3])
    )
    removed = st.builds(
        Removed,
        WORKERS,
        st.lists(PATHS, min_size=1, max_size=4).map(tuple),
        st.sampled_from(tiers),
    )
    return st.integers(0, 19).flatmap(
        lambda kind: st.builds(Cleared, WORKERS) if kind == 0 else stored if kind < 14 else removed
    )


@define
class _Rank:
    held: dict[CacheLevel, set[Path]] = field(factory=lambda: {tier: set() for tier in CacheLevel})
    waiting: dict[Path, set[CacheLevel]] = field(factory=dict)

    def has(self, path: Path) -> bool:
        return any(path in blocks for blocks in self.held.values())


@define
class PlainIndex:
    """Sets of blocks, searched one block and one worker at a time."""

    ranks: dict[WorkerRank, _Rank] = field(factory=dict)

    def apply(self, step: Step) -> None:
        rank = self.ranks.setdefault(step.member, _Rank())
        match step:
            case Stored():
                for block in step.blocks:
                    waiting = rank.waiting.setdefault(block, set())
                    waiting.add(step.tier)
                    self._settle(rank)
            case Removed():
                for block in step.blocks:
                    if block in rank.held[step.tier]:
                        rank.held[step.tier].discard(block)
                    elif block in rank.waiting:
                        rank.waiting[block].discard(step.tier)
            case Cleared():
                self.ranks[step.member] = _Rank()

    def match(self, path: Path) -> dict[WorkerRank, Overlap]:
        found: dict[WorkerRank, Overlap] = {}
        for member, rank in self.ranks.items():
            counts = [0] * len(CacheLevel)
            for end in range(1, len(path) + 1):
                best = next((t for t in CacheLevel if path[:end] in rank.held[t]), None)
                if best is None:
                    break
                counts[best] += 1
            if any(counts):
                found[member] = Overlap(
                    **dict(zip(("device", "host", "disk", "external"), counts, strict=True))
                )
        return found

    @staticmethod
    def _settle(rank: _Rank) -> None:
        """Place what waits below a known parent, until nothing more can be placed."""
        placed = True
        while placed:
            placed = False
            for block, tiers in list(rank.waiting.items()):
                if len(block) == 1 or rank.has(block[:-1]) or rank.has(block):
                    del rank.waiting[block]
                    for tier in tiers:
                        rank.held[tier].add(block)
                    placed = bool(tiers)


def apply_all(plain: PlainIndex, stream: Iterable[Step]) -> PlainIndex:
    for step in stream:
        plain.apply(step)
    return plain
