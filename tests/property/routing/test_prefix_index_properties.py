"""The prefix index against the plainest one, over events in any order and any tiers."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.routing.streams import (
    BLOCK_SIZE,
    PATHS,
    Path,
    PlainIndex,
    Removed,
    Step,
    Stored,
    apply_all,
    hashes_of,
    steps,
)

from commutator.contract.block import CacheLevel
from commutator.routing.prefix_index.index import PrefixIndex, RankSnapshot

STREAMS = st.lists(steps(), max_size=40)


def index_of(stream: list[Step]) -> PrefixIndex:
    index = PrefixIndex(BLOCK_SIZE)
    for step in stream:
        index.apply(step.member.worker_id, step.event(), step.member.rank)
    return index


def everything(index: PrefixIndex) -> dict[str, list[RankSnapshot]]:
    return {member.worker_id: index.snapshot(member.worker_id) for member in list(index._ranks)}


@settings(max_examples=400, deadline=None)
@given(STREAMS, st.lists(PATHS, min_size=1, max_size=8))
def test_matches_equal_the_plain_indexs(stream: list[Step], prompts: list[Path]) -> None:
    index, plain = PrefixIndex(BLOCK_SIZE), PlainIndex()
    for step in stream:
        index.apply(step.member.worker_id, step.event(), step.member.rank)
        plain.apply(step)
        asked = step.path if isinstance(step, Stored) else prompts[0]
        assert index.match(hashes_of(asked)) == plain.match(asked)
    for prompt in prompts:
        assert index.match(hashes_of(prompt)) == plain.match(prompt)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=9), st.integers(1, 9))
def test_holders_that_change_at_any_block_are_matched(
    holders: list[set[int]], each_blocks: int
) -> None:
    """``holders`` are the workers that hold a block, each for several blocks in a row."""
    index = PrefixIndex(BLOCK_SIZE)
    by_block = [workers for workers in holders for _ in range(each_blocks)]
    for worker in range(4):
        held = [block for block, workers in enumerate(by_block) if worker in workers]
        index.store(f"w-{worker}", held)
    expected: dict[str, int] = {}
    for worker in range(4):
        lost = (block for block, workers in enumerate(by_block) if worker not in workers)
        if length := next(lost, len(by_block)):
            expected[f"w-{worker}"] = length
    found = index.match(range(len(by_block)))
    assert {rank.worker_id: overlap.blocks for rank, overlap in found.items()} == expected


@settings(deadline=None)
@given(st.data())
def test_stored_events_may_come_in_any_order(data: st.DataObject) -> None:
    stored = st.lists(steps().filter(lambda step: isinstance(step, Stored)), max_size=25)
    stream = data.draw(stored)
    shuffled = data.draw(st.permutations(stream))
    ours, other = index_of(stream), index_of(shuffled)
    assert ours.statistics().blocks == other.statistics().blocks
    for step in stream:
        assert isinstance(step, Stored)
        assert ours.match(hashes_of(step.path)) == other.match(hashes_of(step.path))


@settings(deadline=None)
@given(STREAMS, STREAMS, PATHS)
def test_a_snapshot_round_trips_through_messagepack(
    before: list[Step], after: list[Step], prompt: Path
) -> None:
    index = index_of(before)
    snapshot = everything(index)
    again = index_of(after)  # what it held is replaced
    for member in list(again._ranks):
        again.restore(member.worker_id, [])
    for worker_id, ranks in snapshot.items():
        packed = msgspec.msgpack.encode(ranks)
        again.restore(worker_id, msgspec.msgpack.decode(packed, type=list[RankSnapshot]))
    assert everything(again) == snapshot
    assert again.statistics() == index.statistics()
    for step in after:
        for one in (index, again):
            one.apply(step.member.worker_id, step.event(), step.member.rank)
    assert again.match(hashes_of(prompt)) == index.match(hashes_of(prompt))
    assert everything(again) == everything(index)


@settings(deadline=None)
@given(STREAMS)
def test_blocks_that_no_worker_holds_take_no_memory(stream: list[Step]) -> None:
    index, plain = index_of(stream), apply_all(PlainIndex(), stream)
    for member, rank in plain.ranks.items():
        for tier in CacheLevel:
            blocks = set(rank.held[tier])
            blocks |= {path for path, tiers in rank.waiting.items() if tier in tiers}
            event = Removed(member, tuple(blocks), tier).event()
            index.apply(member.worker_id, event, member.rank)
    statistics = index.statistics()
    assert (statistics.blocks, len(index._map._sets), statistics.orphans) == (0, 0, 0)
    assert not any(rank.orphans for ranks in everything(index).values() for rank in ranks)


@settings(deadline=None)
@given(STREAMS)
def test_workers_leave_nothing_behind(stream: list[Step]) -> None:
    index = index_of(stream)
    for member in list(index._ranks):
        index.remove_worker(member.worker_id)
    assert everything(index) == {}
    assert index.statistics() == PrefixIndex(BLOCK_SIZE).statistics()
