"""What must always hold in a block manager."""

from __future__ import annotations

from collections import Counter

from commutator.contract.block import BlockKey
from commutator_engine_kit.kv.block_manager.actions import DEVICE
from commutator_engine_kit.kv.block_manager.block_pool import TierBlockPool
from commutator_engine_kit.kv.block_manager.index import BlockIndex
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.block_manager.offload import OffloadScheduler
from commutator_engine_kit.kv.block_manager.onboard import OnboardScheduler
from commutator_engine_kit.kv.connector import KvConnector

__all__ = ["check_connector", "check_integrity"]


def check_connector(connector: KvConnector) -> None:
    """Raise AssertionError when the state of the connector's block manager is inconsistent."""
    with connector._queue:
        check_integrity(connector._stack.manager)


def check_integrity(manager: BlockManager) -> None:
    """Raise AssertionError when the state is inconsistent."""
    index, stores, loads = manager._index, manager._stores, manager._loads
    for key, node in index.nodes.items():
        assert node.offer.key == key, "a node has another key"
        assert node.published | node.staged | node.evicting, "a node is in no tier"
        overlap = node.published & node.staged | node.staged & node.evicting
        assert not overlap | node.published & node.evicting, "a block is in two states in one tier"
    for pool in index.pools:
        _check_tier(pool, index, stores, loads)
    reads = Counter(
        offer.key
        for move in stores.moves.values()
        if move.source == DEVICE
        for offer in move.offers
    )
    for pool in index.pools:
        reads.update(key for key, waiting in pool.waiting.items() if waiting.source == DEVICE)
    assert stores.holds._stores == reads, "a device block is held for no store"


def _check_tier(
    pool: TierBlockPool, index: BlockIndex, stores: OffloadScheduler, loads: OnboardScheduler
) -> None:
    name = pool.spec.name
    nodes = index.nodes.values()
    published = sum(bool(node.published & pool.bit) for node in nodes)
    staged = {node.offer.key for node in nodes if node.staged & pool.bit}
    evicting = {node.offer.key for node in nodes if node.evicting & pool.bit}
    assert published == pool.published, f"{name}: published blocks are miscounted"
    assert len(staged) == pool.staged, f"{name}: staged blocks are miscounted"
    assert evicting == pool.leaving.keys(), f"{name}: leaving blocks are miscounted"
    assert pool.used <= pool.capacity, f"{name}: more blocks than there is room for"
    moving = {
        offer.key
        for move in stores.moves.values()
        if move.target == pool.number
        for offer in move.offers
    }
    assert staged == moving, f"{name}: a block is staged without a move"
    assert pool.cancelled <= staged, f"{name}: a cancelled block is not staged"
    assert pool.staged_offers.keys() == staged, f"{name}: the offers do not match the staged blocks"
    for key in pool.waiting:
        assert key not in staged, f"{name}: a waiting block is being stored"
    assert pool.up or not pool.waiting, f"{name}: a block waits for a tier that is down"
    down = _read_by_moves(pool, index, stores)
    assert pool.moving_down <= set(down), f"{name}: a block moves down without a move"
    assert pool.prefetched <= {
        key for key, node in index.nodes.items() if node.published & pool.bit
    }, f"{name}: a prefetched block is not published"
    pins = Counter(down)
    for load in loads.running.values():
        pins.update(key for key, tier in load.blocks if tier == pool.number)
    assert dict(pins) == pool.pins, f"{name}: pins do not match loads and moves"
    assert evicting <= set(pool.pins), f"{name}: a removed block without readers is not freed"


def _read_by_moves(
    pool: TierBlockPool, index: BlockIndex, stores: OffloadScheduler
) -> list[BlockKey]:
    keys = [
        offer.key
        for move in stores.moves.values()
        if move.source == pool.number
        for offer in move.offers
    ]
    for lower in index.pools:
        keys += [key for key, wait in lower.waiting.items() if wait.source == pool.number]
    return keys
