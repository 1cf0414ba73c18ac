"""Hashing in pieces equals hashing at once, and equals Dynamo's."""

from __future__ import annotations

import pytest
from bench.peers import DynamoPeer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commutator.routing.prefix_index.hashing import local_block_hashes, sequence_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)
BLOCK_SIZES = st.integers(1, 80)
LORA_NAMES = st.none() | st.text(min_size=1, max_size=20)


@given(TOKENS, BLOCK_SIZES, LORA_NAMES, st.data())
def test_known_hashes_can_be_extended_from_anywhere(
    tokens: list[int], block_size: int, lora_name: str | None, data: st.DataObject
) -> None:
    whole = sequence_hashes(tokens, block_size, adapter=lora_name)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert sequence_hashes(tokens, block_size, adapter=lora_name, known=known) == whole


@given(TOKENS, TOKENS, st.integers(1, 16))
def test_equal_prefixes_and_only_those_share_hashes(
    first: list[int], second: list[int], block_size: int
) -> None:
    ours = sequence_hashes(first, block_size)
    for number, (mine, other) in enumerate(
        zip(ours, sequence_hashes(second, block_size), strict=False), start=1
    ):
        end = number * block_size
        assert (mine == other) == (first[:end] == second[:end])


@pytest.mark.long
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tokens=TOKENS, block_size=BLOCK_SIZES, lora_name=LORA_NAMES)
def test_local_hashes_equal_dynamos(
    dynamo: DynamoPeer, tokens: list[int], block_size: int, lora_name: str | None
) -> None:
    theirs = dynamo.ask("hash", token_ids=tokens, block_size=block_size, lora_name=lora_name)
    assert local_block_hashes(tokens, block_size, adapter=lora_name) == theirs
