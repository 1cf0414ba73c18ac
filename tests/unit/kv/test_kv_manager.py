"""What the KV manager decides, case by case."""

from __future__ import annotations

import pytest
from tests.support.kv_world import KvWorld, stored

from commutator.auth.rights import salted
from commutator.contract.block import PLAIN, BlockDescriptor, BlockKey, RetentionHints
from commutator.contract.principal import PrincipalConfig
from commutator.contract.tier import AdmissionConfig
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    FreeBlocks,
    JobUrgency,
    LoadResult,
    ReleaseSource,
    StoreBlocks,
)
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.lru import Lru

ALICE, BOB = (PrincipalConfig().principal(name) for name in ("alice", "bob"))


def key(number: int) -> BlockKey:
    return number.to_bytes(32, "little")


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def chain(*numbers: int, facts: RetentionHints = PLAIN) -> list[BlockDescriptor]:
    parents = [None, *keys(*numbers)]
    return [
        BlockDescriptor(key=key(number), parent=parent, token_ids=(number,), facts=facts)
        for number, parent in zip(numbers, parents, strict=False)
    ]


def tier(name: str, capacity: int, **options: object) -> TierSpec:
    medium = {"dram": "CPU", "nvme": "NVME", "s3": "EXTERNAL"}[name]
    return TierSpec(
        name=name,
        medium=medium,
        capacity_blocks=capacity,
        eviction=lambda _: Lru(),
        **options,  # type: ignore[arg-type]
    )


def offer(world: KvWorld, offers: list[BlockDescriptor], now_s: float = 0.0) -> None:
    world.held.update(block.key for block in offers)
    world.do(world.manager.offer(offers, now_s))


def finish_stores(world: KvWorld, now_s: float = 0.0) -> None:
    while world.moves:
        move = next(iter(world.moves.values()))
        written = world.written(move, move.keys)
        world.do(world.manager.finish_store(move.move_id, written, {}, now_s))


def keep(world: KvWorld, *numbers: int, facts: RetentionHints = PLAIN, now_s: float = 0.0) -> None:
    offer(world, chain(*numbers, facts=facts), now_s)
    finish_stores(world, now_s)


def load(world: KvWorld, *numbers: int, name: str = "load", now_s: float = 0.0) -> None:
    plan = world.manager.begin_onboard(name, keys(*numbers), 0, now_s, compute_s=None)
    assert len(plan.blocks) == len(numbers)
    world.loads[name] = plan


def end_load(
    world: KvWorld,
    result: LoadResult = LoadResult.LOADED,
    name: str = "load",
    now_s: float = 0.0,
) -> None:
    plan = world.loads.pop(name)
    results = {block: result for block, _ in plan.blocks}
    world.do(world.manager.finish_onboard(name, results, now_s))


def test_a_block_is_found_only_once_its_store_ended() -> None:
    world = KvWorld([tier("dram", 4)])
    offer(world, chain(1, 2))
    (move,) = world.moves.values()
    assert (move.source, move.target, move.priority) == (DEVICE, 0, JobUrgency.OFFLOAD)
    assert world.manager.match(keys(1, 2)) == []
    assert world.held[key(1)] == 1, "the device's copy is still read"
    finish_stores(world)
    assert world.manager.match(keys(1, 2, 3)) == [0, 0]
    assert not +world.held


def test_a_block_that_is_being_stored_is_not_stored_again() -> None:
    world = KvWorld([tier("dram", 4)])
    offer(world, chain(1))
    offer(world, chain(1))
    assert len(world.moves) == 1
    assert world.held[key(1)] == 2, "either offer waits for the store that reads the block"
    finish_stores(world)
    assert not +world.held
    assert world.manager.statistics().edge("device", "dram").not_admitted == {"being stored": 1}


def test_what_was_not_stored_is_not_found_and_can_be_stored_later() -> None:
    world = KvWorld([tier("dram", 4)])
    offer(world, chain(1, 2))
    (move,) = world.moves.values()
    written = world.written(move, keys(2))
    world.do(world.manager.finish_store(move.move_id, written, {key(1): "disk full"}, 0.0))
    assert world.manager.match(keys(1, 2)) == []
    assert world.manager.match(keys(2)) == [0]
    assert world.manager.statistics().edge("device", "dram").failed == {"disk full": 1}
    assert world.manager.explain(keys(1), 0.0)[0].reason == "not stored in dram: disk full"
    keep(world, 1)
    assert world.manager.match(keys(1, 2)) == [0, 0]


def test_each_move_and_load_ends_once() -> None:
    manager = KvWorld([tier("dram", 4)]).manager
    with pytest.raises(ValueError, match="no move 7"):
        manager.finish_store(7, [], {}, 0.0)
    with pytest.raises(ValueError, match="no load x"):
        manager.finish_onboard("x", {}, 0.0)


def test_the_device_keeps_a_block_until_the_next_tier_has_it() -> None:
    world = KvWorld([tier("dram", 4, write="on_evict")])
    offer(world, chain(1))
    assert not world.moves, "nothing is written before the device needs the room"
    world.held.update(keys(1))
    world.do(world.manager.offload_evicted(chain(1), 0.0))
    (move,) = world.moves.values()
    assert move.priority == JobUrgency.MAKE_ROOM
    assert world.held[key(1)] == 1
    finish_stores(world)
    assert not +world.held
    world.held.update(keys(1))
    world.do(world.manager.offload_evicted(chain(1), 0.0))
    assert not +world.held, "it is there already"


def test_the_beginning_of_a_chain_outlives_its_end() -> None:
    world = KvWorld([tier("dram", 4)])
    keep(world, 1, 2, 3, 4)
    keep(world, 8, 9)
    assert world.manager.match(keys(1, 2, 3, 4)) == [0, 0]
    assert world.manager.match(keys(8, 9)) == [0, 0]


def test_a_chain_does_not_push_out_its_own_beginning() -> None:
    world = KvWorld([tier("dram", 3)])
    keep(world, 1, 2)
    keep(world, 1, 2, 3, 4, 5)
    assert world.manager.match(keys(1, 2, 3, 4, 5)) == [0, 0, 0]
    assert world.manager.statistics().edge("device", "dram").not_admitted["no room"] == 2


def test_victims_go_down_one_tier_before_they_are_freed() -> None:
    world = KvWorld([tier("dram", 2), tier("nvme", 2, write="on_evict")])
    keep(world, 1)
    keep(world, 2)
    offer(world, chain(3))
    (move,) = world.moves.values()
    assert (move.source, move.target, move.keys) == (0, 1, (key(1),))
    assert world.manager.match(keys(1)) == [0], "still there while it is copied"
    finish_stores(world)
    assert [world.manager.match(keys(number)) for number in (1, 2, 3)] == [[1], [0], [0]]
    assert world.committed == [set(keys(2, 3)), set(keys(1))]
    keep(world, 4)
    keep(world, 5)
    assert world.committed[1] == set(keys(2, 3)), "the last tier forgets the oldest"
    assert world.manager.statistics().tiers[1].removed == {"evicted": 1}


def test_a_tier_that_is_down_is_passed_over() -> None:
    world = KvWorld([tier("dram", 2), tier("nvme", 4)])
    keep(world, 1, 2)
    world.down.add(0)
    world.do(world.manager.tier_down(0, 0.0))
    assert world.manager.match(keys(1, 2)) == [1, 1]
    keep(world, 3)
    assert world.manager.match(keys(3)) == [1]
    assert world.manager.statistics().edge("device", "dram").not_admitted["tier is down"] == 1
    world.down.add(1)
    world.do(world.manager.tier_down(1, 0.0))
    plan = world.manager.begin_onboard("x", keys(1), 0, 0.0, compute_s=None)
    assert (plan.blocks, plan.reason) == ((), "dram is down")
    world.down.clear()
    world.manager.tier_up(0, 0.0)
    assert world.manager.match(keys(1, 2)) == [0, 0]


def test_what_is_loaded_stays_and_what_leaves_is_not_stored_again_meanwhile() -> None:
    world = KvWorld([tier("dram", 1)])
    keep(world, 1)
    load(world, 1)
    keep(world, 2)
    assert world.manager.match(keys(1)) == [0], "a load reads it"
    world.do(world.manager.evict(0.0, keys=keys(1)))
    assert world.manager.match(keys(1)) == []
    offer(world, chain(1))
    assert not world.moves, "its former copy still takes up the room"
    assert world.manager.explain(keys(1), 0.0)[0].held[0].state == "leaving"
    end_load(world)
    assert world.committed == [set()]
    keep(world, 1)
    assert world.manager.match(keys(1)) == [0]


def test_corrupt_and_missing_blocks_are_not_read_again() -> None:
    world = KvWorld([tier("dram", 4)])
    for number, result in ((1, LoadResult.CORRUPT), (2, LoadResult.MISSING)):
        keep(world, number)
        load(world, number)
        end_load(world, result)
        assert world.manager.match(keys(number)) == []
    keep(world, 3)
    load(world, 3)
    end_load(world, LoadResult.FAILED)
    assert world.manager.match(keys(3)) == [0], "it may be readable later"
    (state,) = world.manager.statistics().tiers
    assert state.loads == {"corrupt": 1, "missing": 1, "failed": 1}
    assert world.manager.explain(keys(1), 0.0)[0].reason == "corrupt (dram)"


def test_what_is_evicted_while_it_is_stored_is_never_found() -> None:
    world = KvWorld([tier("dram", 4)])
    offer(world, chain(1))
    world.do(world.manager.clear(0.0))
    finish_stores(world)
    assert world.manager.match(keys(1)) == []
    assert world.committed == [set()]


def test_blocks_of_a_former_life_are_found_and_what_does_not_fit_is_freed() -> None:
    world = KvWorld([tier("nvme", 2)])
    world.committed[0] = set(keys(1, 2, 3))
    world.do(world.manager.recovered(0, [stored(k) for k in keys(1, 2, 3)], 0.0))
    assert world.manager.match(keys(1, 2, 3)) == [0, 0]
    assert world.committed == [set(keys(1, 2))]


def test_what_others_stored_makes_room_for_itself() -> None:
    world = KvWorld([tier("s3", 2, shared=True)])
    keep(world, 1)
    keep(world, 2)
    actions = world.manager.found(0, [stored(key(3))], 0.0)
    assert FreeBlocks(tier=0, keys=(key(1),), reason="evicted") in actions
    assert world.manager.match(keys(3)) == [0]


def test_the_lower_priority_goes_first_and_makes_no_room_for_lower_ones() -> None:
    world = KvWorld([tier("dram", 2)])
    keep(world, 1, facts=RetentionHints(priority=5))
    keep(world, 2)
    keep(world, 3)
    assert world.manager.match(keys(1)) == [0], "older, but more important"
    keep(world, 4, facts=RetentionHints(priority=5))
    keep(world, 5)
    assert world.committed == [set(keys(1, 4))]


def test_a_block_whose_ttl_has_passed_goes_first_but_not_under_a_reader() -> None:
    world = KvWorld([tier("dram", 2)])
    keep(world, 1)
    keep(world, 2, facts=RetentionHints(ttl_s=10.0, priority=5))
    keep(world, 3, now_s=9.0)
    assert world.committed == [set(keys(2, 3))], "within its TTL only its priority counts"
    load(world, 2, now_s=20.0)
    keep(world, 4, now_s=20.0)
    assert world.committed == [set(keys(2, 4))], "a load reads it"
    end_load(world, LoadResult.FAILED, now_s=20.0)
    keep(world, 5, now_s=20.0)
    assert world.committed == [set(keys(4, 5))]


def test_a_use_begins_the_ttl_anew() -> None:
    world = KvWorld([tier("dram", 2)])
    keep(world, 1, facts=RetentionHints(ttl_s=10.0, priority=5))
    keep(world, 2)
    load(world, 1, now_s=9.0)
    end_load(world, now_s=9.0)
    keep(world, 3, now_s=15.0)
    assert world.committed == [set(keys(1, 3))]


def test_pins_hold_until_their_ttl_and_cannot_fill_a_tier() -> None:
    world = KvWorld([tier("dram", 4)])
    keep(world, 1, 2, 3, facts=RetentionHints(pinned=True, ttl_s=60.0))
    (state,) = world.manager.statistics().tiers
    assert (state.retained, state.pins_refused) == (2, 1)
    for number in range(10, 20):
        keep(world, number, now_s=1.0)
    assert len(world.committed[0] & set(keys(1, 2, 3))) == 2
    for number in range(20, 24):
        keep(world, number, now_s=100.0)
    assert not world.committed[0] & set(keys(1, 2, 3))


def test_a_tenant_makes_room_with_its_own_blocks() -> None:
    world = KvWorld([tier("dram", 4, tenant_share=0.5)])
    mine, other = RetentionHints(tenant="me"), RetentionHints(tenant="other")
    keep(world, 1, facts=other)
    for number in (2, 3, 4):
        keep(world, number, facts=mine)
    assert world.committed == [set(keys(1, 3, 4))]
    keep(world, 5)
    assert world.committed == [set(keys(1, 3, 4, 5))], "blocks without a salt have no quota"
    load(world, 3, name="a")
    load(world, 4, name="b")
    keep(world, 6, facts=mine)
    assert world.manager.explain(keys(6), 0.0)[0].reason == "not taken by dram: tenant quota"


@pytest.mark.security
def test_fresh_salts_of_a_principal_get_no_share_of_their_own() -> None:
    world = KvWorld([tier("dram", 4, tenant_share=0.5)])
    keep(world, 1, facts=RetentionHints(tenant=salted(BOB, None)))
    for number in range(2, 9):
        keep(world, number, facts=RetentionHints(tenant=salted(ALICE, f"fresh {number}")))
    keep(world, 9, facts=RetentionHints(tenant=salted(ALICE, None)))
    assert world.committed == [set(keys(1, 8, 9))]


def test_admission_rules_and_their_counters() -> None:
    rules = AdmissionConfig(min_hits=2, max_blocks=3, prompt_only=True)
    world = KvWorld([tier("dram", 8, admission=rules)])
    keep(world, 1)
    assert world.manager.match(keys(1)) == []
    keep(world, 1)
    assert world.manager.match(keys(1)) == [0]
    for number, facts in ((2, RetentionHints(depth=3)), (3, RetentionHints(is_prompt=False))):
        keep(world, number, facts=facts)
        keep(world, number, facts=facts)
    assert world.manager.statistics().edge("device", "dram").not_admitted == {
        "too few hits": 1,
        "too deep in its chain": 2,
        "not part of a prompt": 2,
    }


def test_a_load_slower_than_computing_is_not_done_but_measured_again() -> None:
    world = KvWorld([tier("dram", 8)])
    keep(world, 1, 2)
    fast = 0.016
    manager = world.manager
    manager.begin_onboard("unmeasured", keys(1, 2), 0, 100.0, compute_s=fast)
    world.do(
        manager.finish_onboard("unmeasured", dict.fromkeys(keys(1, 2), LoadResult.LOADED), 101.0)
    )
    plan = manager.begin_onboard("a", keys(1, 2), 0, 102.0, compute_s=fast)
    assert plan.blocks == ()
    assert plan.reason == "slower than recompute: 1000.0 ms against 32.0 ms"
    assert manager.statistics().tiers[0].not_loaded["slower than recompute"] == 2
    plan = manager.begin_onboard("b", keys(1, 2), 0, 140.0, compute_s=fast)
    assert plan.reason.startswith("to measure dram again; slower than recompute")
    assert len(plan.blocks) == 2
    loaded = dict.fromkeys(keys(1, 2), LoadResult.LOADED)
    for name in ("b", *(f"again-{number}" for number in range(60))):
        if name != "b":
            manager.begin_onboard(name, keys(1, 2), 0, 140.0, compute_s=None)
        world.do(manager.finish_onboard(name, loaded, 140.0, seconds={0: 0.001}))
    plan = manager.begin_onboard("c", keys(1, 2), 0, 141.0, compute_s=fast)
    assert plan.reason == "everything", "it has become fast"


def test_why_tells_what_would_be_reused() -> None:
    world = KvWorld([tier("dram", 2), tier("nvme", 8)])
    keep(world, 1, 2, facts=RetentionHints(pinned=True, ttl_s=30.0))
    answers = world.manager.explain(keys(7, 1, 9, 2), 10.0, first=1)
    assert [answer.reason for answer in answers] == [
        "on the device",
        "in dram",
        "never offered",
        "a block before it is missing",
    ]
    assert [answer.tier for answer in answers] == [None, "dram", None, None]
    assert [copy.note for copy in answers[3].held] == ["pinned, for 20 s", "pinned, for 20 s"]


def test_releases_and_moves_are_reported_in_order() -> None:
    """Room is freed before it is used, and a source is released after its last reader."""
    world = KvWorld([tier("dram", 1)])
    keep(world, 1)
    world.held.update(keys(2))
    actions = world.manager.offer(chain(2), 0.0)
    kinds = [type(action) for action in actions]
    assert kinds.index(FreeBlocks) < kinds.index(StoreBlocks)
    assert ReleaseSource not in kinds


def test_a_load_and_the_offer_after_it_are_one_use() -> None:
    class Counting(Lru):
        uses = 0

        def touched(self, key: BlockKey, now_s: float) -> None:
            self.uses += 1
            super().touched(key, now_s)

    policy = Counting()
    world = KvWorld(
        [TierSpec(name="dram", medium="CPU", capacity_blocks=4, eviction=lambda _: policy)]
    )
    keep(world, 1)
    for uses in (1, 2):
        load(world, 1)
        end_load(world)
        keep(world, 1)
        assert policy.uses == uses
    keep(world, 1)
    assert policy.uses == 3, "the device had it: another use"
