"""Block and sequence hashes: the public vectors, every kind of token sequence, wrong input."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from commutator.routing.prefix_index.hashing import (
    chain_hashes,
    hash_seed,
    local_block_hashes,
    sequence_hashes,
)

TOKENS = list(range(1, 33))
LOCAL = [16863443419780771464, 2287610619914608821]


def test_the_public_vectors() -> None:
    assert local_block_hashes(TOKENS, 16) == LOCAL
    assert local_block_hashes(TOKENS, 16, adapter="a") == [
        13989385890342586959,
        2612645568696598570,
    ]


def test_the_first_sequence_hash_is_the_local_one() -> None:
    assert sequence_hashes(TOKENS, 16)[0] == LOCAL[0]
    assert sequence_hashes(TOKENS, 16)[1] not in LOCAL
    assert sequence_hashes(TOKENS, 16) == chain_hashes(LOCAL)


def test_an_empty_adapter_name_is_no_adapter() -> None:
    assert hash_seed("") == hash_seed(None) == 1337
    assert hash_seed("a") != 1337
    assert 0 <= hash_seed("an adapter whose hash is large") < 2**64


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens, dtype=np.uint32),
        lambda tokens: np.array(tokens, dtype=np.int64),
        lambda tokens: np.array(tokens * 2, dtype=np.uint32)[: len(tokens)],
        lambda tokens: np.repeat(np.array(tokens, dtype=np.uint32), 2)[::2],
        lambda tokens: range(1, len(tokens) + 1),
        lambda tokens: memoryview(array("I", tokens)),
    ],
)
def test_every_sequence_of_integers_hashes_alike(
    kind: Callable[[list[int]], Sequence[int]],
) -> None:
    tokens = list(range(1, 150))
    assert local_block_hashes(kind(tokens), 16) == local_block_hashes(tokens, 16)
    assert len(local_block_hashes(tokens, 16)) == 9


def test_only_full_blocks_have_a_hash() -> None:
    assert local_block_hashes([], 16) == []
    assert local_block_hashes(TOKENS[:15], 16) == []
    assert local_block_hashes(TOKENS[:31], 16) == LOCAL[:1]


def test_more_blocks_than_are_split_at_once() -> None:
    tokens = list(range(16 * 200))
    one_by_one = [
        local_block_hashes(tokens[at : at + 16], 16)[0] for at in range(0, len(tokens), 16)
    ]
    assert local_block_hashes(tokens, 16) == one_by_one


def test_known_blocks_are_not_hashed_again() -> None:
    whole = sequence_hashes(TOKENS, 8)
    assert sequence_hashes(TOKENS, 8, known=whole[:3]) == whole
    assert sequence_hashes(TOKENS, 8, known=whole) == whole
    assert sequence_hashes(TOKENS, 8, known=[1, 2, 3])[:3] == [1, 2, 3]
    with pytest.raises(ValueError, match="5 blocks are known of 32 tokens"):
        sequence_hashes(TOKENS, 8, known=[1] * 5)


@pytest.mark.parametrize("token", [-1, 2**32, 0.5])
def test_what_is_no_token_is_refused(token: float) -> None:
    with pytest.raises(ValueError, match="no unsigned 32-bit integer"):
        local_block_hashes([1, 2, 3, token], 4)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no unsigned 32-bit integer"):
        local_block_hashes(np.array([1, 2, 3, -1], dtype=np.int32), 4)  # type: ignore[arg-type]


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        local_block_hashes(TOKENS, 0)


def test_a_parent_makes_another_chain() -> None:
    whole = chain_hashes([1, 2, 3, 4])
    assert chain_hashes([3, 4], whole[1]) == whole[2:]
    assert chain_hashes([], 7) == []
    assert chain_hashes([]) == []


def test_a_salt_has_hashes_of_its_own() -> None:
    plain = sequence_hashes(TOKENS, 16)
    salted = sequence_hashes(TOKENS, 16, cache_salt="a")
    assert not set(plain) & set(salted)
    assert salted == sequence_hashes(TOKENS, 16, cache_salt="a", known=salted[:1])
    assert salted != sequence_hashes(TOKENS, 16, cache_salt="b")
    assert sequence_hashes(TOKENS, 16, cache_salt="") != plain, "an empty salt is a salt"
    assert sequence_hashes(TOKENS, 16, cache_salt="\ud800"), "JSON can bring half a character"
