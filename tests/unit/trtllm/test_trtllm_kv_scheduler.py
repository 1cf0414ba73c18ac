"""The orders that the KV connector's scheduler makes of TensorRT-LLM's calls."""

from __future__ import annotations

import pytest
from tests.support.trtllm.kv_executor import RequestData

from commutator_trtllm.kv_scheduler import ConnectorMetadata, Load, TierScheduler
from commutator_trtllm.kv_staging import Stage

SIZE = 4
TOKENS = list(range(21))
"""Five full blocks, and one token that is always computed."""


@pytest.fixture
def scheduler() -> TierScheduler:
    return TierScheduler(block_size=SIZE, wait_s=1.0)


def claimed(scheduler: TierScheduler, blocks: int = 5, computed: int = 0) -> Stage:
    stage = scheduler.arrived(1, TOKENS, computed, None)
    assert stage is not None
    assert scheduler.staged(1, stage, blocks) == blocks * SIZE
    return stage


def first_step(scheduler: TierScheduler, pages: list[int], computed: int = 0) -> ConnectorMetadata:
    """With the second cache manager."""
    data = RequestData(1, TOKENS, pages, computed, 1, new_block_ids_by_layer_group=[pages])
    return scheduler.orders([data], [])


@pytest.mark.parametrize(
    ("start", "end", "places"),
    [
        (0, 8, (2, 3, 4)),
        (0, 6, (1, 2, 3, 4)),  # of the second block some tokens are used
        (12, 20, (0, 1, 2)),
        (10, 20, (0, 1, 2)),  # so they are of the third
        (0, 20, ()),
        (20, 20, (0, 1, 2, 3, 4)),
    ],
)
def test_cancelled_tokens_are_not_loaded(
    scheduler: TierScheduler, start: int, end: int, places: tuple[int, ...]
) -> None:
    stage = claimed(scheduler)
    scheduler.cancelled(1, start, end)
    pages = [10, 11, 12, 13, 14, 15]
    (load,) = first_step(scheduler, pages).loads
    assert load == Load(stage.number, places, tuple(pages[place] for place in places))


def test_both_ends_may_be_cancelled(scheduler: TierScheduler) -> None:
    claimed(scheduler, blocks=4, computed=SIZE)
    scheduler.cancelled(1, 4, 8)
    scheduler.cancelled(1, 16, 20)
    (load,) = first_step(scheduler, [10, 11, 12, 13, 14, 15], computed=8).loads
    assert (load.places, load.device_blocks) == ((1, 2), (12, 13))


def test_what_has_no_page_is_not_loaded(scheduler: TierScheduler) -> None:
    claimed(scheduler)
    (load,) = first_step(scheduler, [10, -1, 12]).loads
    assert (load.places, load.device_blocks) == ((0, 2), (10, 12))


def test_what_is_over_is_dropped_and_forgotten(scheduler: TierScheduler) -> None:
    stage = claimed(scheduler)
    scheduler.ended(1)
    assert scheduler.orders([], []) == ConnectorMetadata(drops=[stage.number])
    claimed(scheduler)
    assert first_step(scheduler, [10, 11, 12, 13, 14, 15]).stores == []
    scheduler.orders([], [RequestData(1, [21, 22, 23], [], 21, 3)])  # fills the sixth block
    scheduler.ended(1)
    assert scheduler.orders([], []) == ConnectorMetadata(forget=[1])


def test_what_not_all_ranks_have_is_dropped(scheduler: TierScheduler) -> None:
    stage = scheduler.arrived(1, TOKENS, 0, None)
    assert stage is not None
    assert scheduler.staged(1, stage, 0) == 0
    assert scheduler.orders([], []).drops == [stage.number]


def test_only_what_was_computed_is_kept(scheduler: TierScheduler) -> None:
    """In chunks, and with a claim that the second cache manager may not have used."""
    claimed(scheduler, blocks=1)
    pages = [10, 11, 12, 13, 14, 15]
    data = RequestData(1, TOKENS, pages, 0, 8, new_block_ids_by_layer_group=[pages])
    (store,) = scheduler.orders([data], []).stores
    assert (store.first, store.device_blocks) == (1, (11,))
    data = RequestData(1, [], [], 12, 9, new_block_ids_by_layer_group=[[]])
    (store,) = scheduler.orders([], [data]).stores
    assert (store.first, store.device_blocks) == (2, (12, 13, 14))


def test_what_was_never_asked_for_is_left_alone(scheduler: TierScheduler) -> None:
    """TensorRT-LLM's warm-up requests."""
    data = RequestData(7, TOKENS, [0, 1, 2, 3, 4, 5], 0, 21)
    assert scheduler.orders([data], [data]) == ConnectorMetadata()


@pytest.mark.parametrize("computed", [2, 20])
def test_nothing_is_asked_for(scheduler: TierScheduler, computed: int) -> None:
    """The device has part of a block, or all but the last token."""
    assert scheduler.arrived(1, TOKENS, computed, None) is None
