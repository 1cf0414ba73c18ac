"""Reported uses, requests for blocks that are being moved, and blocks without room."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

import pytest
from attrs import evolve
from tests.support.kv_integrity import check_integrity
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, content, setups
from tests.support.kv_world import KvWorld, stored

from commutator.contract.block import PLAIN, BlockDescriptor, RetentionHints
from commutator.contract.tier import AdmissionConfig, StoredBlock
from commutator_dram.tier import DramTier
from commutator_engine_kit.kv.arena import checksum
from commutator_engine_kit.kv.block_manager.actions import FreeBlocks, JobUrgency, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.lru import Lru

KEPT = RetentionHints(pinned=True, ttl_s=60.0, priority=5)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def offer(number: int, facts: RetentionHints = PLAIN) -> BlockDescriptor:
    return BlockDescriptor(key=key(number), parent=None, token_ids=(number,), facts=facts)


def world(*capacities: int, write: str = "through", below: str = "on_evict") -> KvWorld:
    specs = [
        TierSpec(
            name=f"tier-{number}",
            medium="CPU",
            capacity_blocks=capacity,
            eviction=lambda _: Lru(),
            write=below if number else write,  # type: ignore[arg-type]
        )
        for number, capacity in enumerate(capacities)
    ]
    return KvWorld(specs)


def give(world: KvWorld, number: int, facts: RetentionHints = PLAIN) -> None:
    world.held[key(number)] += 1
    world.do(world.manager.offer([offer(number, facts)], 0.0))


def end_stores(world: KvWorld, *, fail: bool = False) -> None:
    while world.moves:
        move = next(iter(world.moves.values()))
        written = world.written(move, [] if fail else move.keys)
        world.do(world.manager.finish_store(move.move_id, written, {}, 0.0))
        check_integrity(world.manager)


def note(world: KvWorld, number: int) -> str:
    (why,) = world.manager.explain([key(number)], 0.0)
    return why.held[0].note


def test_what_is_asked_while_a_block_is_stored_holds() -> None:
    tiers = world(4)
    give(tiers, 1)
    give(tiers, 1, KEPT)
    give(tiers, 1, RetentionHints(priority=1))  # less than that
    end_stores(tiers)
    assert note(tiers, 1) == "priority 5, pinned, for 60 s"
    assert tiers.manager.statistics().tiers[0].retained == 1


def test_what_is_asked_while_a_block_waits_for_room_holds() -> None:
    tiers = world(1, 4)
    give(tiers, 1)
    end_stores(tiers)
    give(tiers, 2)  # waits: block 1 moves down first
    give(tiers, 2, KEPT)
    end_stores(tiers)
    assert note(tiers, 2) == "priority 5, for 60 s", "half of one block may be pinned"


def test_what_is_asked_while_a_block_moves_down_goes_with_it() -> None:
    tiers = world(1, 4)
    give(tiers, 1)
    end_stores(tiers)
    give(tiers, 2)
    give(tiers, 1, KEPT)
    end_stores(tiers)
    (why,) = tiers.manager.explain([key(1)], 0.0)
    assert [held.note for held in why.held if held.name == "tier-1"] == [
        "priority 5, pinned, for 60 s"
    ]


def test_what_is_asked_for_a_store_that_fails_is_forgotten() -> None:
    tiers = world(4)
    give(tiers, 1)
    give(tiers, 1, KEPT)
    end_stores(tiers, fail=True)
    give(tiers, 1)
    end_stores(tiers)
    assert note(tiers, 1) == ""


def counting(hits: int) -> KvWorld:
    spec = TierSpec(
        name="dram",
        medium="CPU",
        capacity_blocks=4,
        eviction=lambda _: Lru(),
        admission=AdmissionConfig(min_hits=hits),
        write="on_evict",
    )
    return KvWorld([spec])


def evict(world: KvWorld, number: int) -> None:
    world.held[key(number)] += 1
    world.do(world.manager.offload_evicted([offer(number)], 0.0))
    end_stores(world)


def test_reported_uses_decide_when_the_device_evicts() -> None:
    tiers = counting(2)
    for _ in range(3):
        evict(tiers, 1)  # no use
    tiers.manager.used([key(1)])
    evict(tiers, 1)
    assert tiers.manager.match([key(1)]) == []
    tiers.manager.used([key(1)])
    evict(tiers, 1)
    assert tiers.manager.match([key(1)]) == [0]


def test_a_load_and_the_use_after_it_are_one() -> None:
    tiers = counting(3)
    for _ in range(3):
        tiers.manager.used([key(1)])
    evict(tiers, 1)
    assert tiers.manager.begin_onboard("x", [key(1)], 0, 0.0, compute_s=None).blocks
    tiers.do(tiers.manager.finish_onboard("x", {key(1): LoadResult.LOADED}, 0.0))
    counted = tiers.manager._uses
    assert counted is not None
    before = counted[key(1)]
    tiers.manager.used([key(1)])
    assert counted[key(1)] == before
    tiers.manager.used([key(1)])
    assert counted[key(1)] == before + 1


def test_it_can_be_asked_what_would_be_taken() -> None:
    tiers = counting(2)
    offers = [offer(number) for number in (1, 2)]
    tiers.manager.used([key(1), key(2)])
    assert tiers.manager.admissible(offers) == set()  # used once
    tiers.manager.used([key(1), key(2)])
    assert tiers.manager.admissible(offers) == {key(1), key(2)}
    assert not tiers.manager.statistics().edges, "nothing is counted as refused"
    tiers.held[key(1)] += 1
    tiers.do(tiers.manager.offload_evicted([offer(1)], 0.0))
    assert tiers.manager.admissible(offers) == {key(2)}, "the other is on its way"
    end_stores(tiers)
    assert tiers.manager.admissible(offers) == {key(2)}
    tiers.do(tiers.manager.tier_down(0, 0.0))
    assert tiers.manager.admissible(offers) == set()


@pytest.mark.parametrize("pinned", [0, 3])
def test_what_is_found_and_has_no_room_is_given_back(pinned: int) -> None:
    tiers = world(4)
    for number in range(pinned):
        give(tiers, number)  # being stored: their room is taken
    new = [key(10 + number) for number in range(6)]
    actions = tiers.manager.found(0, [stored(one) for one in new], 0.0)
    freed = [one for one in actions if isinstance(one, FreeBlocks)]
    assert [one.keys for one in freed] == [tuple(new[4 - pinned :])]
    assert all(one.makes_room for one in freed), "others who share the tier keep them"
    assert tiers.manager.match(new) == [0] * (4 - pinned)


class SharedDram(DramTier):
    """Others have put blocks into it, which a probe finds."""

    shared = True
    others: frozenset[bytes] = frozenset()

    def probe(self, keys: Sequence[bytes]) -> list[StoredBlock | None]:
        assert self._memory is not None
        wanted = [one for one in keys if self.table.lookup(one) is None and one in self.others]
        new = []
        for one, slot in zip(wanted, self.reserve(wanted), strict=True):
            if slot is not None:
                data = content(one)
                self._memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = data
                made = StoredBlock(
                    key=one, slot=slot, size_bytes=BLOCK_BYTES, checksum=checksum(data)
                )
                new.append(made)
        self.commit(new)
        return self.lookup(keys)


def test_a_shared_tier_that_found_more_than_fits_can_still_be_written_to() -> None:
    (setup,) = setups({"kind": "dram", "capacity": 4 * BLOCK_BYTES, "huge_pages": "off"})
    assert isinstance(setup.tier, DramTier)
    tier = SharedDram(setup.tier._config)
    others = chain(9, 4)
    tier.others = frozenset(others)
    busy, go = threading.Event(), threading.Event()

    def hold(_: object) -> Generator[None]:
        busy.set()
        go.wait()
        yield

    with KvRig([evolve(setup, tier=tier)]) as rig:
        rig.connector.on_tier(0, JobUrgency.FREE, hold)
        assert busy.wait(20)
        rig.offload(chain(1, 3))  # have their room, and no slots yet
        asked = rig.connector.lookups.plan(others)
        assert not asked.done()
        go.set()
        rig.connector.loads.cancel(asked.result(20))
        rig.settle()
        for number in range(100, 106):
            rig.store(chain(number, 1))
        state = rig.tier("dram")
        assert state.published == tier.statistics().committed == state.capacity
        assert rig.stored("device", "dram") >= 6
