"""Blocks behind the end of their prompt leave a tier first, until one of them is used."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.block import PLAIN, BlockKey, RetentionHints
from commutator_engine_kit.kv import KvGroup, KvKind, is_behind
from commutator_engine_kit.kv.block_manager.block_pool import Retention, rank_of
from commutator_eviction import Lru

BEHIND = RetentionHints(behind=True)


def key(number: int) -> BlockKey:
    return number.to_bytes(32, "little")


def retention(*blocks: tuple[int, RetentionHints]) -> Retention:
    made = Retention(Lru, most_pinned=4)
    for number, facts in blocks:
        made.added(key(number), None, facts, 0.0)
    return made


def victims(made: Retention, count: int, facts: RetentionHints = PLAIN) -> list[int]:
    found = made.victims(count, lambda _: True, 1.0, rank_of(facts))
    return [int.from_bytes(each, "little") for each in found]


def test_they_go_first_and_make_no_room_for_themselves_among_others() -> None:
    made = retention((1, PLAIN), (2, BEHIND), (3, PLAIN), (4, BEHIND))
    assert victims(made, 3) == [2, 4, 1]
    assert victims(made, 3, BEHIND) == [2, 4]


def test_one_that_is_used_counts_as_any_other() -> None:
    made = retention((1, PLAIN), (2, BEHIND), (3, BEHIND))
    made.touched(key(2), 0.5)
    assert not made.is_behind(key(2))
    assert victims(made, 3) == [3, 1, 2]
    made.removed(key(2), evicted=True)
    made.removed(key(3), evicted=True)
    assert victims(made, 3) == [1]


def test_one_that_ends_another_prompt_counts_as_any_other() -> None:
    made = retention((1, PLAIN), (2, BEHIND))
    made.offered_again(key(2), None, BEHIND, 0.5)
    assert made.is_behind(key(2))
    made.offered_again(key(2), None, PLAIN, 0.5)
    assert victims(made, 2) == [1, 2]


def test_a_priority_counts_before_that() -> None:
    low, high = RetentionHints(priority=-1), evolve(BEHIND, priority=1)
    made = retention((1, high), (2, BEHIND), (3, low), (4, PLAIN))
    assert victims(made, 4, RetentionHints(priority=1)) == [3, 2, 4, 1]


@given(
    st.sampled_from([KvKind.SLIDING, KvKind.CHUNKED, KvKind.RECURRENT, KvKind.FULL]),
    st.integers(1, 16),
    st.integers(1, 100),
    st.integers(1, 400),
)
def test_what_continues_or_repeats_a_prompt_needs_none_of_them(
    kind: KvKind, size: int, window: int, prompt_tokens: int
) -> None:
    windowed = kind in {KvKind.SLIDING, KvKind.CHUNKED}
    group = KvGroup(kind=kind, block_size=size, window=window if windowed else 0)
    behind = {
        index
        for index in range(prompt_tokens // size)
        if is_behind(group, index, prompt_tokens, size)
    }
    repeated = (prompt_tokens - 1) // size * size
    continued = prompt_tokens // size * size
    for boundary in {repeated, continued}:
        assert behind.isdisjoint(group.needed(boundary))
    if kind is KvKind.RECURRENT and repeated:
        assert behind == set(range(repeated // size - 1))
    if kind is KvKind.FULL:
        assert not behind
