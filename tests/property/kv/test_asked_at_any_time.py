"""Retention holds whenever it was asked for: before, while or after a block was stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.kv_integrity import check_integrity
from tests.support.kv_world import KvWorld

from commutator.contract.block import BlockDescriptor, RetentionHints, strongest
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.lru import Lru

KEY = b"k" * 32
asked = st.builds(
    RetentionHints,
    priority=st.integers(-3, 3),
    ttl_s=st.sampled_from([None, 30.0, 60.0]),
    pinned=st.booleans(),
)


def note(facts: list[RetentionHints], stored_after: int) -> str:
    """The state of a block after these requests, when its store ended after that many of them."""
    spec = TierSpec(name="dram", medium="CPU", capacity_blocks=4, eviction=lambda _: Lru())
    world = KvWorld([spec])
    for number, one in enumerate(facts):
        world.held[KEY] += 1
        offer = BlockDescriptor(key=KEY, parent=None, token_ids=(1,), facts=one)
        world.do(world.manager.offer([offer], 0.0))
        if number == stored_after:
            (move,) = world.moves.values()
            written = world.written(move, move.keys)
            world.do(world.manager.finish_store(move.move_id, written, {}, 0.0))
        check_integrity(world.manager)
    assert not +world.held
    return world.manager.explain([KEY], 0.0)[0].held[0].note


@given(facts=st.lists(asked, min_size=1, max_size=5), data=st.data())
def test_what_was_asked_holds_whenever_the_block_was_stored(
    facts: list[RetentionHints], data: st.DataObject
) -> None:
    stored_after = data.draw(st.integers(0, len(facts) - 1))
    assert note(facts, stored_after) == note(facts, 0), "as if it had been there at once"
    pins = [one for one in facts if one.pinned]
    if pins:
        assert note(facts, stored_after) == note([strongest(pins)], 0)
