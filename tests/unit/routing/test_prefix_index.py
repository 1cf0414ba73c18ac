"""The prefix index: tiers, ranks, odd events, block sizes, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import asdict

from commutator.contract.block import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    CacheLevel,
    cache_level,
)
from commutator.contract.routing import Overlap, WorkerRank
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex, RankBlocks
from commutator.routing.prefix_index.snapshot import IndexFormat

SIZE = 4
TOKENS = tuple(range(100, 100 + 8 * SIZE))
HASHES = sequence_hashes(TOKENS, SIZE)
W0, W1 = WorkerRank("w0"), WorkerRank("w1")


def stored(first: int = 0, end: int = 4, **other: Any) -> BlockStored:
    """Blocks ``first`` to ``end`` of the one prompt; the engine calls them 1000, 1001, ..."""
    values: dict[str, Any] = {
        "block_hashes": tuple(range(1000 + first, 1000 + end)),
        "parent_block_hash": 999 + first if first else None,
        "token_ids": TOKENS[first * SIZE : end * SIZE],
        "block_size": SIZE,
    }
    return BlockStored(**(values | other))


def removed(*blocks: int, medium: str | None = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=tuple(1000 + block for block in blocks), medium=medium)


def counters(index: PrefixIndex, rank: int = 0) -> dict[str, int]:
    return {name: count for name, count in asdict(rank_of(index, rank).counters).items() if count}


def rank_of(index: PrefixIndex, rank: int = 0) -> RankBlocks:
    return index.worker_ranks("w0")[rank]


def test_each_worker_has_its_longest_prefix() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4))
    index.apply("w1", stored(0, 2))
    index.apply("w2", stored(0, 4, token_ids=tuple(range(4 * SIZE))))
    assert index.match(HASHES) == {W0: Overlap(device=4), W1: Overlap(device=2)}
    assert index.match(HASHES[:3]) == {W0: Overlap(device=3), W1: Overlap(device=2)}
    assert index.match([]) == {}
    assert index.match(sequence_hashes(TOKENS[SIZE:], SIZE)) == {}, "the same blocks elsewhere"


def test_ranks_have_caches_of_their_own() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4), 0)
    index.apply("w0", stored(0, 6), 1)
    index.apply("w0", BlocksCleared(), 0)
    assert index.match(HASHES) == {WorkerRank("w0", 1): Overlap(device=6)}
    assert list(index._ranks) == [W0, WorkerRank("w0", 1)]


def test_a_block_counts_for_its_fastest_tier() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 2))
    index.apply("w0", stored(1, 4, medium="CPU"))
    index.apply("w0", stored(3, 6, medium="DISK"))
    index.apply("w0", stored(6, 7, medium="REMOTE"))
    index.apply("w1", stored(0, 1))
    expected = {W0: Overlap(device=2, host=2, disk=2, external=1), W1: Overlap(device=1)}
    assert index.match(HASHES) == expected
    assert index.match(HASHES)[W0].blocks == 7
    index.apply("w0", removed(0, 1))
    assert index.match(HASHES) == {W1: Overlap(device=1)}
    index.apply("w0", stored(0, 1, medium="CPU_PINNED"))
    assert index.match(HASHES)[W0] == Overlap(host=4, disk=2, external=1)


def test_a_gap_ends_the_prefix_until_it_is_filled() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 6))
    index.apply("w0", removed(2))
    assert index.match(HASHES) == {W0: Overlap(device=2)}
    index.apply("w0", stored(2, 3))
    assert index.match(HASHES) == {W0: Overlap(device=6)}  # the engine had kept 3 to 5


def test_orphan_blocks_wait_for_their_parent() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(4, 6))
    index.apply("w0", stored(2, 4))
    assert index.match(HASHES) == {}
    assert index.statistics().orphans == 4
    index.apply("w0", stored(0, 2))
    assert index.match(HASHES) == {W0: Overlap(device=6)}
    assert index.statistics().orphans == 0
    assert counters(index) == {}


def test_orphans_can_be_removed_before_their_parent_comes() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(2, 4))
    index.apply("w0", stored(2, 3, medium="CPU"))
    index.apply("w0", removed(2))
    index.apply("w0", removed(3))
    index.apply("w0", stored(0, 2))
    assert index.match(HASHES) == {W0: Overlap(device=2, host=1)}
    assert not rank_of(index).orphans


def test_orphans_are_bounded_and_the_oldest_go() -> None:
    index = PrefixIndex(SIZE, max_orphans=3)
    index.apply("w0", stored(1, 3))
    index.apply("w0", stored(4, 6))
    assert (len(rank_of(index).orphans), rank_of(index).orphans.dropped) == (3, 1)
    index.apply("w0", stored(0, 1))
    assert index.match(HASHES) == {W0: Overlap(device=1)}, "block 1 was the oldest"


def test_an_orphan_that_is_stored_anew_waits_for_its_new_parent() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(2, 3, parent_block_hash=5))
    index.apply("w0", stored(2, 3))
    index.apply("w0", stored(0, 1, block_hashes=(5,), token_ids=tuple(range(SIZE))))
    assert index.statistics().orphans == 1
    index.apply("w0", stored(0, 2))
    assert index.match(HASHES) == {W0: Overlap(device=3)}


def test_a_block_that_is_its_own_parent_does_no_harm() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(1, 2, parent_block_hash=1001))
    index.apply("w0", stored(0, 2))
    assert index.match(HASHES) == {W0: Overlap(device=2)}
    assert index.statistics().orphans == 0


def test_duplicates_change_nothing() -> None:
    index = PrefixIndex(SIZE)
    for _ in range(3):
        index.apply("w0", stored(0, 4))
    index.apply("w0", removed(3))
    assert index.match(HASHES) == {W0: Overlap(device=3)}


def test_removal_of_the_unknown_changes_nothing() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", removed(0))
    index.apply("w0", stored(0, 2))
    index.apply("w0", removed(7, 1))
    index.apply("w0", removed(0, medium="CPU"))
    assert index.match(HASHES) == {W0: Overlap(device=1)}


def test_a_block_with_two_names_stays_until_both_are_removed() -> None:
    """Engines may name equal tokens differently, for example under another cache salt."""
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 2))
    index.apply("w0", stored(0, 2, block_hashes=(b"x", b"y")))
    index.apply("w0", removed(0, 1))
    assert index.match(HASHES) == {W0: Overlap(device=2)}
    index.apply("w0", BlockRemoved(block_hashes=(b"x", b"y")))
    assert index.match(HASHES) == {}
    assert index.statistics().blocks == 0
    index.apply("w0", stored(0, 2))
    index.apply("w0", stored(0, 2, block_hashes=(b"x", b"y")))
    index.apply("w0", BlocksCleared())
    assert index.statistics().blocks == 0


def test_a_name_that_is_given_to_other_tokens_leaves_the_old_ones() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 1))
    index.apply("w0", stored(0, 1, token_ids=tuple(range(SIZE))))
    assert index.match(HASHES) == {}
    assert index.match(sequence_hashes(range(SIZE), SIZE)) == {W0: Overlap(device=1)}
    index.apply("w0", stored(0, 2, block_hashes=(1000, 1000)))  # twice in one event
    index.apply("w0", removed(0))
    assert index.statistics().blocks == 0


def test_signed_unsigned_and_byte_names_are_distinguished() -> None:
    index = PrefixIndex(SIZE)
    names = (-1, 2**64 - 1, b"\xff" * 8)
    index.apply("w0", stored(0, 3, block_hashes=names))
    index.apply("w0", BlockRemoved(block_hashes=names[2:]))
    assert index.match(HASHES) == {W0: Overlap(device=2)}
    index.apply("w0", BlockRemoved(block_hashes=names[:1]))
    assert index.match(HASHES) == {}


def test_adapters_do_not_share_blocks() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4, adapter="a"))
    assert index.match(HASHES) == {}
    assert index.match(sequence_hashes(TOKENS, SIZE, adapter="a")) == {W0: Overlap(device=4)}


def test_a_worker_can_be_reset_or_removed() -> None:
    index = PrefixIndex(SIZE)
    for rank in (0, 1):
        index.apply("w0", stored(0, 4), rank)
        index.apply("w1", stored(0, 2), rank)
    index.reset_worker("w0", 1)
    assert set(index.match(HASHES)) == {W0, W1, WorkerRank("w1", 1)}
    index.reset_worker("w0")
    assert set(index.match(HASHES)) == {W1, WorkerRank("w1", 1)}
    assert rank_of(index).sizes == (0, 0, 0, 0), "a reset worker is still known"
    index.remove_worker("w0")
    index.remove_worker("nobody")
    assert index.worker_ranks("w0") == {}
    index.apply("w2", stored(0, 1))  # takes a slot that became free
    assert index.match(HASHES)[WorkerRank("w2")] == Overlap(device=1)
    assert index.holds("w2", HASHES[0])
    assert not index.holds("w2", HASHES[1])
    assert not index.holds("w0", HASHES[0])


def test_engine_blocks_may_be_a_multiple_of_ours() -> None:
    index = PrefixIndex(SIZE)
    large = {"block_size": 2 * SIZE}
    index.apply("w0", stored(0, 4, block_hashes=(7, 8), **large))
    index.apply("w0", stored(4, 6, block_hashes=(9,), parent_block_hash=8, **large))
    assert index.match(HASHES) == {W0: Overlap(device=6)}
    assert rank_of(index).block_sizes == {8}
    index.apply("w0", BlockRemoved(block_hashes=(8,)))
    assert index.match(HASHES) == {W0: Overlap(device=2)}
    again = PrefixIndex(SIZE)
    again.restore("w0", index.snapshot("w0"))
    again.apply("w0", BlockRemoved(block_hashes=(7, 9)))
    assert again.statistics().blocks == 0


@pytest.mark.parametrize("block_size", [1, 3, 6])
def test_engine_blocks_that_do_not_fit_are_counted_not_indexed(block_size: int) -> None:
    index = PrefixIndex(SIZE)
    event = stored(0, 3, block_size=block_size, token_ids=tuple(range(3 * block_size)))
    index.apply("w0", event)
    assert index.statistics().blocks == 0
    assert counters(index) == {"unusable": 3}
    assert rank_of(index).block_sizes == {block_size}


@pytest.mark.security
@pytest.mark.parametrize("size", [1 << 20, SIZE << 40, 1 << 62])
def test_sizes_of_an_events_choice_cost_nothing(size: int) -> None:
    """A list of the block's parts would fill the memory of the front door."""
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 3, block_size=size))
    assert counters(index) == {"malformed": 3}
    index.apply("w0", stored(0, 3, block_size=size, token_ids=()))
    index.apply("w0", BlockRemoved(block_hashes=tuple(range(100))))
    large = stored(0, 1, block_size=SIZE << 13, token_ids=range(SIZE << 13))
    index.apply("w0", large)
    assert counters(index)["unusable"] == 1
    assert rank_of(index).block_sizes == set()
    assert index.statistics().blocks == 0


@pytest.mark.security
def test_sizes_and_media_without_end_are_not_remembered() -> None:
    index = PrefixIndex(SIZE)
    for number in range(1, 100):
        tokens = tuple(range(SIZE * number))
        event = stored(0, 1, block_size=len(tokens), token_ids=tokens, medium="x" * 100 * number)
        index.apply("w0", event)
    assert len(rank_of(index).block_sizes) == 16
    assert len(rank_of(index).unknown_media) <= 16
    assert max(map(len, rank_of(index).unknown_media)) == 64


@pytest.mark.parametrize("block_size", [0, SIZE, 2 * SIZE, 3])
def test_a_lower_tiers_blocks_without_tokens_say_nothing_of_block_sizes(block_size: int) -> None:
    """The offloading connector of vLLM, unless told to describe itself, has blocks of 0 tokens."""
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4))
    index.apply("w0", stored(3, 4, token_ids=(), block_size=block_size, medium="CPU"))
    index.apply("w0", removed(*range(4)))
    assert index.match(HASHES) == {}
    assert rank_of(index).sizes == (0, 1, 0, 0)
    assert rank_of(index).block_sizes == {SIZE}
    index.apply("w0", stored(0, 4))
    assert index.match(HASHES) == {W0: Overlap(device=4)}


def test_blocks_of_a_lower_tier_may_be_larger() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4, block_hashes=(1, 2, 3, 4)))
    chunk = {"block_size": 2 * SIZE, "medium": "CPU"}
    index.apply("w0", stored(0, 2, block_hashes=(2,), **chunk))
    index.apply("w0", stored(2, 4, block_hashes=(4,), parent_block_hash=2, **chunk))
    index.apply("w0", BlockRemoved(block_hashes=(1, 2, 3, 4), medium="GPU"))
    assert index.match(HASHES) == {W0: Overlap(host=4)}
    index.apply("w0", stored(4, 5, block_hashes=(5,), parent_block_hash=4))
    assert index.match(HASHES) == {W0: Overlap(device=1, host=4)}
    again = PrefixIndex(SIZE)
    again.restore("w0", index.snapshot("w0"))
    for one in (index, again):
        one.apply("w0", BlockRemoved(block_hashes=(4,), medium="CPU"))
        assert one.match(HASHES) == {W0: Overlap(host=2)}
        one.apply("w0", BlockRemoved(block_hashes=(2,), medium="CPU"))
        one.apply("w0", BlockRemoved(block_hashes=(5,), medium="GPU"))
        assert one.statistics().blocks == 0
    assert rank_of(index).block_sizes == {SIZE, 2 * SIZE}


def test_tokens_that_do_not_fit_the_blocks_are_counted_not_indexed() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 3, token_ids=TOKENS[:-1]))
    assert index.statistics().blocks == 0
    assert counters(index) == {"malformed": 3}


def test_blocks_without_tokens_are_known_by_their_name() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 2))
    index.apply("w0", stored(0, 3, token_ids=(), medium="CPU"))
    index.apply("w0", removed(0, 1))
    assert index.match(HASHES) == {W0: Overlap(host=2)}
    assert counters(index)["untraceable"] == 1


def test_a_lower_tier_links_blocks_whose_parent_is_gone() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 4))
    index.apply("w0", removed(1))
    index.apply("w0", stored(2, 6, medium="CPU"))  # its parent, block 1, lies nowhere
    index.apply("w0", stored(1, 2))
    assert index.match(HASHES) == {W0: Overlap(device=4, host=2)}


def test_media_are_tiers() -> None:
    assert [cache_level(word) for word in (None, "GPU", "cpu", "CPU_TIER2", "SHARED", "TAPE")] == [
        CacheLevel.DEVICE, CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.DISK, CacheLevel.EXTERNAL,
        None,
    ]  # fmt: skip
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(0, 2, medium="TAPE"))
    assert index.match(HASHES) == {W0: Overlap(external=2)}
    assert rank_of(index).unknown_media == {"TAPE"}


def test_hashes_can_be_stored_without_events() -> None:
    index = PrefixIndex(SIZE)
    index.store("w0", HASHES[:4])
    index.store("w0", HASHES[:5], tier=CacheLevel.HOST)
    index.remove("w0", HASHES[3:4])
    assert index.match(HASHES) == {W0: Overlap(device=3, host=2)}


def test_indexes_of_one_block_size_understand_each_other() -> None:
    assert IndexFormat.of(SIZE, 2) == IndexFormat.of(SIZE, 2)
    assert IndexFormat.of(SIZE, 2) != IndexFormat.of(2 * SIZE, 2)


def test_memory_stays_bounded_under_prefix_churn() -> None:
    """Engines with room for 100 blocks see 2,000 different prompts."""
    index = PrefixIndex(SIZE)
    for prompt in range(2_000):
        hashes = [1000 * prompt + block for block in range(10)]
        worker = f"w{prompt % 2}"
        index.store(worker, hashes)
        if prompt >= 20:
            index.remove(worker, [1000 * (prompt - 20) + block for block in range(10)])
    assert index.statistics().blocks == 200
    assert len(index._map._sets) == 2


@pytest.mark.parametrize("asked", [1, 63, 64, 65, 128, 129, 200])
def test_long_prefixes_are_looked_up_in_pieces_without_a_seam(asked: int) -> None:
    index = PrefixIndex(SIZE)
    hashes = list(range(1, 201))
    lengths = {"w1": 1, "w63": 63, "w64": 64, "w65": 65, "w128": 128, "w129": 129, "w200": 200}
    for worker, blocks in lengths.items():
        index.store(worker, hashes[:blocks])
    index.store("w200", hashes[60:130], tier=CacheLevel.DISK)
    index.remove("w200", hashes[60:130])
    found = index.match(hashes[:asked])
    for worker, blocks in lengths.items():
        held = min(blocks, asked)
        on_disk = len(range(60, min(asked, 130))) if worker == "w200" else 0
        assert found[WorkerRank(worker)] == Overlap(device=held - on_disk, disk=on_disk)


def test_a_salt_sets_blocks_apart() -> None:
    index = PrefixIndex(SIZE)
    index.apply("w0", stored(2, 4))  # comes before its parents; engines salt the first block only
    index.apply("w0", stored(0, 2, cache_salt="a"))
    index.apply("w1", stored(0, 3))
    salted = {salt: sequence_hashes(TOKENS, SIZE, cache_salt=salt) for salt in "ab"}
    assert index.match(salted["a"]) == {W0: Overlap(device=4)}
    assert index.match(salted["b"]) == {}
    assert index.match(HASHES) == {W1: Overlap(device=3)}
    index.apply("w0", removed(0, 1, 2, 3))
    assert index.match(salted["a"]) == {}
