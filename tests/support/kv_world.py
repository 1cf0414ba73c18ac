"""Carries out what the KV manager asks for, and checks that it was allowed to ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from commutator.contract.block import BlockKey
from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    Action,
    Announce,
    FreeBlocks,
    ReleaseSource,
    StoreBlocks,
)
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.block_manager.onboard import OnboardPlan

__all__ = ["KvWorld", "stored"]


def stored(key: BlockKey, parent: BlockKey | None = None) -> StoredBlock:
    return StoredBlock(key=key, slot=0, size_bytes=1, checksum=0, parent=parent)


class KvWorld:
    """The device, and tiers that are sets of keys."""

    def __init__(self, specs: Sequence[TierSpec], **options: float) -> None:
        self.manager = BlockManager(specs, **options)  # type: ignore[arg-type]
        self.capacities = [spec.capacity_blocks for spec in specs]
        self.down: set[int] = set()
        self.committed: list[set[BlockKey]] = [set() for _ in specs]
        self.reserved: list[set[BlockKey]] = [set() for _ in specs]
        self.announced: list[set[BlockKey]] = [set() for _ in specs]
        self.held: Counter[BlockKey] = Counter()
        """Offers of each block that were not answered with ReleaseSource."""
        self.moves: dict[int, StoreBlocks] = {}
        self.loads: dict[str, OnboardPlan] = {}
        self.seen_moves: set[int] = set()

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StoreBlocks():
                    self._store(action)
                case FreeBlocks():
                    self._free(action)
                case ReleaseSource():
                    self._release(action)
                case Announce():
                    self._announce(action)

    def written(self, move: StoreBlocks, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """A move ended: these of its blocks are in the target."""
        del self.moves[move.move_id]
        self.reserved[move.target] -= set(move.keys)
        self.committed[move.target] |= set(keys)
        return [stored(key) for key in keys]

    def _store(self, action: StoreBlocks) -> None:
        keys, target = set(action.keys), action.target
        assert keys, "a move of nothing"
        assert len(keys) == len(action.keys), "a block twice in one move"
        assert action.move_id not in self.seen_moves, "a move twice"
        assert target not in self.down, "a store to a tier that is down"
        assert not keys & self.committed[target], "stored again"
        assert not keys & self.reserved[target], "stored twice at the same time"
        if action.source == DEVICE:
            assert all(self.held[key] > 0 for key in keys), "not on the device any more"
        else:
            assert keys <= self.committed[action.source], "not in the source"
        self.seen_moves.add(action.move_id)
        self.moves[action.move_id] = action
        self.reserved[target] |= keys
        self.check_room(target)

    def _free(self, action: FreeBlocks) -> None:
        keys = set(action.keys)
        assert keys <= self.committed[action.tier], "freed what is not there"
        assert not keys & self.announced[action.tier], "freed before routers were told"
        assert not keys & self.read_from(action.tier), "freed while something reads it"
        self.committed[action.tier] -= keys

    def _release(self, action: ReleaseSource) -> None:
        for key in action.keys:
            self.held[key] -= 1
            assert self.held[key] >= 0, "released more often than offered"
            assert key not in self.read_from(DEVICE), "released while a move reads it"

    def _announce(self, action: Announce) -> None:
        keys = {block.key for block in action.blocks}
        assert len(keys) == len(action.blocks), "announced twice at once"
        if action.what == "stored":
            assert keys <= self.committed[action.tier], "announced what is not stored"
            assert not keys & self.announced[action.tier], "announced twice"
            self.announced[action.tier] |= keys
        else:
            assert keys <= self.announced[action.tier], "removed what was not announced"
            self.announced[action.tier] -= keys

    def read_from(self, place: int) -> set[BlockKey]:
        moving = {key for m in self.moves.values() if m.source == place for key in m.keys}
        loads = {key for p in self.loads.values() for key, tier in p.blocks if tier == place}
        return moving | loads

    def check_room(self, tier: int) -> None:
        used = len(self.committed[tier]) + len(self.reserved[tier])
        assert used <= self.capacities[tier], "more than fits"

    def fastest(self, key: BlockKey) -> list[int]:
        """What ``match`` must say of this key alone."""
        tiers = [
            tier
            for tier, keys in enumerate(self.announced)
            if key in keys and tier not in self.down
        ]
        return tiers[:1]
