"""Blocks of different adapters, salts and media are never taken for each other, anywhere."""

from __future__ import annotations

from itertools import combinations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator import AdapterIdentity, GenerateRequest, MediaIdentity, SamplingParams
from commutator.contract.block import (
    BlockStored,
    CacheIdentity,
    EventBatch,
    block_keys,
    media_in,
    next_key,
)
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex

SIZE = 4
TOKENS = st.lists(st.integers(0, 5), min_size=SIZE, max_size=6 * SIZE)
DIGESTS = st.sampled_from([f"{number:064x}" for number in range(3)])
ADAPTERS = st.none() | DIGESTS
SALTS = st.sampled_from([None, "", "a", f"{1:064x}"])
MEDIA = st.lists(
    st.builds(
        MediaIdentity,
        kind=st.just("image"),
        digest=DIGESTS,
        start=st.integers(0, 4 * SIZE),
        tokens=st.integers(1, 2 * SIZE),
    ),
    max_size=2,
).map(tuple)
NAMESPACES = st.tuples(ADAPTERS, SALTS)
IDENTITY = CacheIdentity(
    model="m", weights="w", tokenizer="t", dtype="d", layout="l", block_size=SIZE
)


def seen(tokens: list[int], media: tuple[MediaIdentity, ...], count: int) -> object:
    """What the first ``count`` blocks are made of."""
    stop = count * SIZE
    inside = [
        (one.start, one.digest, number * SIZE)
        for number in range(count)
        for one in media
        if one.start < (number + 1) * SIZE and one.start + one.tokens > number * SIZE
    ]
    return tokens[:stop], inside


@given(TOKENS, TOKENS, st.lists(NAMESPACES, min_size=2, max_size=2), MEDIA, MEDIA)
def test_equal_names_mean_equal_blocks(
    first: list[int],
    second: list[int],
    spaces: list[tuple[str | None, str | None]],
    media: tuple[MediaIdentity, ...],
    others: tuple[MediaIdentity, ...],
) -> None:
    (adapter, salt), (other_adapter, other_salt) = spaces
    mine = sequence_hashes(first, SIZE, adapter=adapter, cache_salt=salt, media=media)
    other = sequence_hashes(
        second, SIZE, adapter=other_adapter, cache_salt=other_salt, media=others
    )
    keys = block_keys(evolve(IDENTITY, adapter=adapter, cache_salt=salt), first, media=media)
    other_keys = block_keys(
        evolve(IDENTITY, adapter=other_adapter, cache_salt=other_salt), second, media=others
    )
    for count in range(1, min(len(mine), len(other)) + 1):
        same = spaces[0] == spaces[1] and seen(first, media, count) == seen(second, others, count)
        assert (mine[count - 1] == other[count - 1]) == same
        assert (keys[count - 1] == other_keys[count - 1]) == same
    if spaces[0] != spaces[1]:
        assert not {*mine} & {*other}
        assert not {*keys} & {*other_keys}


@given(TOKENS, NAMESPACES, MEDIA, st.data())
def test_media_can_be_hashed_from_anywhere(
    tokens: list[int],
    space: tuple[str | None, str | None],
    media: tuple[MediaIdentity, ...],
    data: st.DataObject,
) -> None:
    adapter, salt = space
    whole = sequence_hashes(tokens, SIZE, adapter=adapter, cache_salt=salt, media=media)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert whole == sequence_hashes(
        tokens, SIZE, adapter=adapter, cache_salt=salt, media=media, known=known
    )
    keys = block_keys(IDENTITY, tokens, media=media)
    assert keys == block_keys(IDENTITY, tokens, keys[: len(known)], media=media)


@given(TOKENS, st.lists(NAMESPACES, min_size=1, max_size=4, unique=True), NAMESPACES)
def test_a_request_matches_only_blocks_of_its_adapter_and_salt(
    tokens: list[int],
    held: list[tuple[str | None, str | None]],
    asked: tuple[str | None, str | None],
) -> None:
    """From an engine's events over the wire to the front door's index."""
    index = PrefixIndex(SIZE)
    blocks = len(tokens) // SIZE
    for number, (adapter, salt) in enumerate(held):
        event = BlockStored(
            block_hashes=tuple(range(100 * number, 100 * number + blocks)),
            parent_block_hash=None,
            token_ids=tuple(tokens[: blocks * SIZE]),
            block_size=SIZE,
            adapter=adapter,
            cache_salt=salt,
        )
        (arrived,) = decode_batch(encode_batch(EventBatch(timestamp_s=0, events=(event,)))).events
        assert arrived == event
        index.apply("w", arrived)
    adapter, salt = asked
    request = GenerateRequest(
        request_id="r",
        token_ids=tokens,
        sampling=SamplingParams(),
        adapter=None if adapter is None else AdapterIdentity(name="sql", digest=adapter),
        cache_salt=salt,
    )
    hashes = sequence_hashes(
        tokens, SIZE, adapter=request.adapter_digest, cache_salt=request.cache_salt
    )
    assert bool(index.match(hashes)) == (asked in held)


@given(st.integers(0, 2**32), st.binary(min_size=32, max_size=32))
def test_identities_differ_in_each_of_their_parts(token: int, parent: bytes) -> None:
    changed = [
        evolve(IDENTITY, **change)
        for change in (
            {},
            {"weights": "v"},
            {"adapter": "0" * 64},
            {"cache_salt": "0" * 64},
            {"weights": "w0" * 32, "adapter": None},
        )
    ]
    assert all(one.digest != other.digest for one, other in combinations(changed, 2))
    picture = MediaIdentity(kind="image", digest="0" * 64, start=0, tokens=1)
    shifted = evolve(picture, start=1)
    assert next_key(parent, [token]) != next_key(parent, [token], media_in([picture], 0, 1))
    assert media_in([shifted], 0, 1) == b""
    assert media_in([picture], 0, 2) != media_in([shifted], 0, 2)
