"""Tiers that are only read from: nothing is stored there, and nothing leaves them downwards."""

from __future__ import annotations

from typing import Any

from tests.support.kv_integrity import check_integrity
from tests.support.kv_world import KvWorld, stored

from commutator.contract.block import BlockDescriptor
from commutator_engine_kit.kv.block_manager.actions import StoreBlocks
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.lru import Lru


def spec(name: str, capacity: int, **options: Any) -> TierSpec:
    return TierSpec(
        name=name,
        medium=name.upper(),
        capacity_blocks=capacity,
        eviction=lambda _: Lru(),
        **options,
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def offers(*numbers: int) -> list[BlockDescriptor]:
    return [
        BlockDescriptor(key=key(number), parent=None, token_ids=(number,)) for number in numbers
    ]


def offer(world: KvWorld, *numbers: int) -> list[StoreBlocks]:
    """The moves that this begins, finished."""
    world.held.update(key(number) for number in numbers)
    world.do(world.manager.offer(offers(*numbers), 0.0))
    begun = []
    while world.moves:
        move = next(iter(world.moves.values()))
        begun.append(move)
        written = world.written(move, move.keys)
        world.do(world.manager.finish_store(move.move_id, written, {}, 0.0))
    return begun


def test_blocks_pass_by_a_tier_that_is_only_read() -> None:
    world = KvWorld(
        [
            spec("dram", 2),
            spec("peer", 100, write="never", shared=True),
            spec("nvme", 10, write="on_evict"),
        ]
    )
    assert {move.target for move in offer(world, 1, 2)} == {0}
    moves = offer(world, 3)
    assert {(move.source, move.target) for move in moves} == {(-1, 0), (0, 2)}
    assert sorted(world.manager.match([key(n)])[0] for n in (1, 2, 3)) == [0, 0, 2]
    check_integrity(world.manager)


def test_what_a_peer_was_found_to_have_is_forgotten_and_goes_nowhere() -> None:
    world = KvWorld(
        [spec("peer", 2, write="never", shared=True), spec("nvme", 10, write="on_evict")]
    )
    for number in range(5):
        world.committed[0].add(key(number))
        world.do(world.manager.found(0, [stored(key(number))], float(number)))
    assert not world.moves
    assert world.manager.match([key(3), key(4)]) == [0, 0]
    assert world.manager.match([key(0)]) == []
    assert world.manager.statistics().tiers[0].removed == {"evicted": 3}
    check_integrity(world.manager)


def test_a_device_above_read_only_tiers_stores_nothing() -> None:
    world = KvWorld([spec("peer", 100, write="never", shared=True)])
    assert not offer(world, 1, 2)
    assert not +world.held, "the device's blocks are its own again"
    world.held.update([key(3)])
    world.do(world.manager.offload_evicted(offers(3), 0.0))
    assert not world.moves
    assert not +world.held
