"""vLLM's groups of layers as the tiers know them, and what is stored and loaded of each."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_vllm import BLOCK_TOKENS, WHOLE, FakeRequest, FakeVllm
from tests.support.faults import damage
from tests.support.foreign_engine import dram, prompt

from commutator.errors import ConfigError
from commutator_engine_kit.kv import BlockPart, KvGroup, KvKind
from commutator_vllm.connector_metadata import ConnectorMetadata, LookupResult, WorkerReport
from commutator_vllm.kv_groups import groups_of
from commutator_vllm.kv_memory import overlay
from commutator_vllm.kv_scheduler import TierScheduler

SLIDING = KvGroup(kind=KvKind.SLIDING, block_size=BLOCK_TOKENS, window=BLOCK_TOKENS + 1)
RECURRENT = KvGroup(kind=KvKind.RECURRENT, block_size=BLOCK_TOKENS)
PROMPT = [*prompt(1, 4), 1]


def spec(name: str, block_size: int = 16, **facts: Any) -> Any:
    """A layer's specification: an object whose class has vLLM's name."""
    made = type(name, (), {})()
    vars(made).update(block_size=block_size, page_size_bytes=512, **facts)
    return made


def config(*specs: Any) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=one, layer_names=[f"layers.{number}.b", f"layers.{number}.a"])
        for number, one in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def test_groups_keep_their_kind_window_and_size() -> None:
    found = groups_of(
        config(
            spec("FullAttentionSpec", sliding_window=None),
            spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=3),
            spec("ChunkedLocalAttentionSpec", attention_chunk_size=128),
            spec("MambaSpec", 1152, mamba_cache_mode="align"),
            spec(
                "UniformTypeKVCacheSpecs", kv_cache_specs={"layers.4.a": spec("MLAAttentionSpec")}
            ),
        )
    )
    kinds = [(group.kind, group.block_size, group.window) for group in found]
    assert kinds == [
        (KvKind.FULL, 16, 0),
        (KvKind.SLIDING, 16, 67),
        (KvKind.CHUNKED, 16, 128),
        (KvKind.RECURRENT, 1152, 0),
        (KvKind.LATENT, 16, 0),
    ]
    assert found[0].layers == ("layers.0.a", "layers.0.b")
    assert [group.block_bytes for group in found] == [1024, 1024, 1024, 1024, 512]


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (spec("CrossAttentionSpec"), "CrossAttentionSpec"),
        (spec("MambaSpec", mamba_cache_mode="all"), "--mamba-cache-mode align"),
        (
            spec(
                "UniformTypeKVCacheSpecs",
                kv_cache_specs={
                    "a": spec("SlidingWindowSpec", sliding_window=8),
                    "b": spec("SlidingWindowSpec", sliding_window=16),
                },
            ),
            "its layers differ",
        ),
    ],
)
def test_other_groups_are_refused(refused: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        groups_of(config(spec("FullAttentionSpec"), refused))


def part(address: int, size_bytes: int = 8, stride_bytes: int = 8) -> BlockPart:
    return BlockPart(address=address, size_bytes=size_bytes, stride_bytes=stride_bytes)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([part(0), part(32)], [part(0), part(32)], id="a region for each layer"),
        pytest.param([part(0), part(32), part(0)], [part(0), part(32)], id="layers of two groups"),
        pytest.param([part(0, 4), part(0, 6)], [part(0, 6)], id="one needs less of a page"),
        pytest.param(
            [part(0, 4, 16), part(8, 4, 16), part(0, 12, 16)],
            [part(0, 12, 16)],
            id="one behind another in each block",
        ),
    ],
)
def test_groups_share_bytes(pieces: Sequence[BlockPart], expected: Sequence[BlockPart]) -> None:
    parts: list[BlockPart] = []
    for piece in pieces:
        overlay(parts, piece, 4)
    assert parts == expected


@pytest.mark.parametrize("piece", [part(8), part(0, 4, 4), part(4)])
def test_blocks_that_are_divided_otherwise_are_refused(piece: BlockPart) -> None:
    with pytest.raises(ConfigError, match="different blocks"):
        overlay([part(0)], piece, 4)


def scheduler(*groups: KvGroup, workers: int = 1) -> tuple[TierScheduler, FakeRequest]:
    """The scheduler's side alone, with a request of four blocks and one token."""
    made = TierScheduler(groups=groups, num_blocks=64, workers=workers, lag=0)
    made.pool = FakePool()
    request = FakeRequest("r", list(PROMPT), len(PROMPT))
    made.arrived(request)
    return made, request


class FakePool:
    null_block = 0

    def hold(self, blocks: Sequence[int]) -> None:
        assert 0 not in blocks

    def released(self, blocks: Sequence[int]) -> None:
        assert 0 not in blocks


def test_only_what_the_boundary_needs_is_loaded() -> None:
    made, request = scheduler(WHOLE[0], SLIDING, RECURRENT)
    assert made.match(request, 0) is None
    (lookup,) = made.orders({}, lambda _: (), 0.0).lookups
    made.reported(WorkerReport((LookupResult(lookup.number, 3 * BLOCK_TOKENS, ("CPU",) * 3),)))
    assert made.match(request, 0) == 3 * BLOCK_TOKENS
    made.allocated(request, [[1, 2, 3], [0, 0, 4], [0, 0, 5]], 3 * BLOCK_TOKENS)
    (load,) = made.orders({}, lambda _: (), 0.0).loads
    assert load.device_blocks == ((1, 2, 3), (4,), (5,))
    assert made.sources_of(request, 3 * BLOCK_TOKENS) == {"CPU": 3 * BLOCK_TOKENS}


def test_ranks_agree_on_a_boundary_that_all_can_serve() -> None:
    """The last boundary of one rank need not be one of another's: both are asked again."""
    made, request = scheduler(WHOLE[0], RECURRENT, workers=2)
    assert made.match(request, 0) is None
    (first,) = made.orders({}, lambda _: (), 0.0).lookups
    assert first.limit == 4 * BLOCK_TOKENS
    for boundary in (4, 2):
        made.reported(
            WorkerReport((LookupResult(first.number, boundary * BLOCK_TOKENS, ("CPU",)),))
        )
    assert made.match(request, 0) is None
    orders = made.orders({}, lambda _: (), 0.0)
    (second,) = orders.lookups
    assert orders.drops == [first.number]
    assert second.limit == 2 * BLOCK_TOKENS
    for _ in range(2):
        made.reported(WorkerReport((LookupResult(second.number, BLOCK_TOKENS, ("CPU",)),)))
    assert made.match(request, 0) == BLOCK_TOKENS


@pytest.mark.parametrize(
    ("boundary", "reaches", "wanted"),
    [
        pytest.param(1, (3, 3), 3, id="others went on to where no state was kept"),
        pytest.param(0, (3, 2), 2, id="as far as all ranks know them"),
        pytest.param(2, (2, 2), 0, id="all that is shared is loaded"),
    ],
)
def test_a_state_is_kept_where_a_prompt_leaves_those_in_the_tiers(
    boundary: int, reaches: tuple[int, int], wanted: int
) -> None:
    made, request = scheduler(WHOLE[0], RECURRENT, workers=2)
    assert made.match(request, 0) is None
    (lookup,) = made.orders({}, lambda _: (), 0.0).lookups
    for reach in reaches:
        answer = LookupResult(lookup.number, boundary * BLOCK_TOKENS, shared=reach * BLOCK_TOKENS)
        made.reported(WorkerReport((answer,)))
    for _ in range(2):  # vLLM asks again where it has no room, and then knows of its own only
        request.shared_prefix_boundary = 0
        assert made.match(request, 0) == boundary * BLOCK_TOKENS
        assert request.shared_prefix_boundary == wanted * BLOCK_TOKENS
    request.shared_prefix_boundary = 4 * BLOCK_TOKENS
    made.match(request, 0)
    assert request.shared_prefix_boundary == 4 * BLOCK_TOKENS


def stored(orders: ConnectorMetadata) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(store.group, store.first, store.device_blocks) for store in orders.stores]


def test_blocks_that_left_a_window_are_not_stored() -> None:
    made, _ = scheduler(WHOLE[0], SLIDING)
    orders = made.orders({"r": len(PROMPT)}, lambda _: [[1, 2, 3, 4], [0, 6, 0, 8]], 0.0)
    assert stored(orders) == [(0, 0, (1, 2, 3, 4)), (1, 1, (6,)), (1, 3, (8,))]


def test_states_are_stored_at_the_end_of_a_block() -> None:
    made, _ = scheduler(WHOLE[0], RECURRENT)
    states = {"r": [(1, 9, 2 * BLOCK_TOKENS), (1, 8, 2 * BLOCK_TOKENS + 1)], "gone": [(1, 7, 4)]}
    orders = made.orders({"r": 2 * BLOCK_TOKENS}, lambda _: [[1, 2, 3, 4], [0, 9]], 0.0, states)
    assert stored(orders) == [(0, 0, (1, 2)), (1, 1, (9,))]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_damaged_block_lowers_the_boundary_for_all_groups(group: int) -> None:
    with FakeVllm(dram(), blocks=40, groups=(WHOLE[0], SLIDING, RECURRENT)) as vllm:
        for _ in range(2):  # the second one finds what the first has stored
            request = vllm.run(vllm.arrive(PROMPT))
            vllm.finish(request)
            while vllm.scheduler.busy:
                vllm.step()
        assert request.hits == 4 * BLOCK_TOKENS
        (engine,) = vllm.engines
        (setup,) = engine.connector.tiers
        key = engine.connector.lookups.keys(PROMPT, group=group)[3]
        (slot,) = setup.tier.lookup([key])
        assert slot is not None
        damage(setup.tier, slot, 0)
        request = vllm.arrive(PROMPT)
        vllm.run(request)
        assert vllm.failed_loads == 1
        assert request.hits == 4 * BLOCK_TOKENS + 3 * BLOCK_TOKENS, "of both attempts"
        vllm.settle()  # compares all blocks of all groups
