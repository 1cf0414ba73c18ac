"""Blocks that are damaged go for good; those that only make room stay for other workers."""

from __future__ import annotations

from tests.support.kv_world import KvWorld, stored

from commutator_engine_kit.kv.block_manager.actions import FreeBlocks, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.lru import Lru

KEYS = [number.to_bytes(32, "little") for number in range(3)]


def bucket_of(blocks: int) -> KvWorld:
    """A tier that others share, of which that many blocks are known, and no more can be."""
    spec = TierSpec(
        name="s3", medium="EXTERNAL", capacity_blocks=blocks, shared=True, eviction=lambda _: Lru()
    )
    world = KvWorld([spec])
    world.committed[0] = set(KEYS[:blocks])
    world.do(world.manager.found(0, [stored(key) for key in KEYS[:blocks]], 0.0))
    return world


def end_load(world: KvWorld, name: str, result: LoadResult) -> list[FreeBlocks]:
    """What is let go of with the end of this load of the first block."""
    actions = world.manager.finish_onboard(name, {KEYS[0]: result}, 0.0)
    return [action for action in actions if isinstance(action, FreeBlocks)]


def test_a_corrupt_block_that_another_reads_goes_as_corrupt_once_it_is_read() -> None:
    world = bucket_of(1)
    for name in ("a", "b"):
        world.manager.begin_onboard(name, KEYS[:1], 0, 0.0, compute_s=None)
    assert end_load(world, "a", LoadResult.CORRUPT) == []
    [free] = end_load(world, "b", LoadResult.LOADED)
    assert (free.keys, free.reason, free.makes_room) == ((KEYS[0],), "corrupt", False)


def test_the_oldest_only_makes_room() -> None:
    world = bucket_of(2)
    world.committed[0].add(KEYS[2])
    actions = world.manager.found(0, [stored(KEYS[2])], 1.0)
    [free] = [action for action in actions if isinstance(action, FreeBlocks)]
    assert free.makes_room
    assert free.reason == "evicted"


def test_what_an_operator_evicts_goes_for_good() -> None:
    world = bucket_of(2)
    [free] = [a for a in world.manager.evict(0.0) if isinstance(a, FreeBlocks)]
    assert not free.makes_room
