"""Keys of blocks and the events and eviction order of the pool."""

from __future__ import annotations

from hashlib import sha256

import pytest
from attrs import evolve
from tests.support.reference_integrity import chain_of, check_pool

from commutator import GenerateRequest, SamplingParams
from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored
from commutator_reference.block_pool import BlockPool
from commutator_reference.scheduler import ANONYMOUS, Sequence


def chain(pool: BlockPool, *contents: tuple[int, ...]) -> list[int]:
    """Allocate, register and hold one block for each of ``contents``."""
    blocks = pool.allocate(len(contents))
    assert blocks is not None
    return [pool.register(*each) for each in zip(blocks, chain_of(contents), strict=True)]


def test_a_key_chains_the_parent_and_the_tokens() -> None:
    request = GenerateRequest(
        request_id="r", token_ids=[1, 258, 3, 4, 5], sampling=SamplingParams(), cache_salt="t"
    )
    sequence = Sequence.start(0, request, 0, 0)
    second, first = sequence.descriptor(1, 2), sequence.descriptor(0, 2)
    root = evolve(ANONYMOUS, cache_salt="t").digest
    assert first.key == sha256(root + bytes([1, *[0] * 7, 2, 1, *[0] * 6])).digest()
    assert second.key == sha256(first.key + bytes([3, *[0] * 7, 4, *[0] * 7])).digest()
    assert [first.parent, second.parent] == [None, first.key]
    assert [first.token_ids, second.token_ids] == [(1, 258), (3, 4)]
    assert sequence.reusable(2) == [first, second]


def test_no_two_namespaces_share_a_root() -> None:
    texts = [None, "", "0", "a", "ab", "1a", "\ud800"]
    roots = {
        evolve(ANONYMOUS, adapter=lora, cache_salt=salt).digest for lora in texts for salt in texts
    }
    assert len(roots) == len(texts) ** 2


def test_a_block_with_the_same_key_but_other_tokens_is_not_served() -> None:
    pool = BlockPool(2, 2)
    chain(pool, (1, 2))
    (real,) = chain_of([(1, 2)])
    forged = evolve(real, token_ids=(3, 4))
    assert pool.find(real) is not None
    assert pool.find(forged) is None
    (other,) = pool.allocate(1) or []
    assert pool.register(other, forged) == other
    assert pool.find(real) != other
    check_pool(pool)


def test_free_blocks_are_used_before_cached_ones_and_old_before_new() -> None:
    pool = BlockPool(4, 1)
    old = chain(pool, (1,), (2,))
    new = chain(pool, (3,))
    pool.release(old)
    pool.release(new)
    assert (pool.cached, pool.available, pool.held) == (3, 4, 0)
    pool.take_events()
    (free,) = pool.allocate(1) or []
    assert free not in {*old, *new}
    # Of the old chain the child goes first, its parent next.
    assert pool.allocate(3) == [old[1], old[0], new[0]]
    removed = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert len(removed) == 3


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2, 1)
    first, second = chain(pool, (1,)), chain(pool, (2,))
    pool.release(first)
    pool.release(second)
    pool.acquire(first[0])
    pool.release(first)
    assert pool.allocate(1) == second


def test_blocks_stored_together_are_one_event() -> None:
    pool = BlockPool(8, 2)
    chain(pool, (1, 2), (3, 4), (5, 6))
    chain(pool, (7, 8))
    first, second = pool.take_events()
    assert isinstance(first, BlockStored)
    assert first.token_ids == (1, 2, 3, 4, 5, 6)
    assert len(first.block_hashes) == 3
    assert first.parent_block_hash is None
    assert isinstance(second, BlockStored)
    assert second.token_ids == (7, 8)
    assert pool.take_events() == []


def test_a_later_child_names_its_parent() -> None:
    pool = BlockPool(8, 2)
    chain(pool, (1, 2))
    (stored,) = pool.take_events()
    assert isinstance(stored, BlockStored)
    chain(pool, (1, 2), (3, 4))
    (child,) = pool.take_events()
    assert isinstance(child, BlockStored)
    assert child.parent_block_hash == stored.block_hashes[0]
    assert child.token_ids == (3, 4)


def test_clear_keeps_what_is_held() -> None:
    pool = BlockPool(4, 1)
    held, unused = chain(pool, (1,)), chain(pool, (2,))
    pool.release(unused)
    pool.take_events()
    pool.clear()
    assert pool.find_prefix(chain_of([(1,)])) == held
    assert pool.find_prefix(chain_of([(2,)])) == []
    (removed,) = pool.take_events()
    assert isinstance(removed, BlockRemoved)
    pool.release(held)
    pool.clear()
    assert pool.take_events() == [BlocksCleared()]
    assert (pool.cached, pool.available) == (0, 4)


def test_too_many_blocks_are_refused_whole() -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(4) is None
    assert pool.available == 3


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(3, 1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.release(blocks)


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(3, 1, prefix_caching=False)
    pool.release(chain(pool, (1,)))
    assert pool.cached == 0
    assert pool.take_events() == []
