"""Where a prompt can be resumed: beside a count, token by token, that shares no code with it."""

from __future__ import annotations

from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from commutator.contract.block import CacheIdentity
from commutator_engine_kit.kv import KvGroup, KvKind, group_identities, usable_boundary
from commutator_engine_kit.kv.groups import sequence_bytes, shared_boundary, usable_boundaries

BASE = CacheIdentity(
    model="m", weights="w", tokenizer="t", dtype="float32", layout="l", block_size=4
)
OLD_DIGEST = "51490570c1f9c631b08f72c4d1b56e4c5620e98fd92e6ca38ffa5f3ed635ae6a"


def reads(kind: str, window: int, token: int) -> set[int]:
    """The tokens before ``token`` whose keys and values, or state after them, it is made from."""
    before = set(range(token))
    if kind == "sliding":
        return {each for each in before if token - each < window}
    if kind == "chunked":
        return {each for each in before if each // window == token // window}
    if kind == "recurrent":
        return {token - 1} & before
    return before


def serves(group: KvGroup, there: list[bool], boundary: int) -> bool:
    if group.kind == "cross" or boundary % group.block_size:
        return False
    blocks = {each // group.block_size for each in reads(group.kind, group.window, boundary)}
    return all(block < len(there) and there[block] for block in blocks)


def expected(groups: list[KvGroup], there: list[list[bool]], limit: int) -> list[int]:
    pairs = list(zip(groups, there, strict=True))
    return [at for at in range(limit, 0, -1) if all(serves(g, has, at) for g, has in pairs)]


@st.composite
def group(draw: st.DrawFn) -> KvGroup:
    kind = draw(st.sampled_from(list(KvKind)))
    windowed = kind in {KvKind.SLIDING, KvKind.CHUNKED}
    window = draw(st.integers(1, 40)) if windowed else 0
    return KvGroup(kind=kind, block_size=draw(st.sampled_from([1, 2, 3, 4, 8])), window=window)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[KvGroup], list[list[bool]], int]:
    groups = draw(st.lists(group(), min_size=1, max_size=4))
    limit = draw(st.integers(0, 64))
    mostly = st.integers(0, 9).map(lambda number: number > 0)
    there = [draw(st.lists(mostly, max_size=limit // each.block_size + 2)) for each in groups]
    return groups, there, limit


SLIDING = KvGroup(kind=KvKind.SLIDING, block_size=4, window=5)
"""At 8 it reads the tokens from 4 on; at 12 from 8 on."""


@given(models())
@example(([SLIDING], [[False, True]], 8))
@example(([SLIDING], [[True, False, True]], 12))
def test_the_largest_boundary_that_all_groups_serve(
    case: tuple[list[KvGroup], list[list[bool]], int],
) -> None:
    groups, there, limit = case
    wanted = expected(groups, there, limit)
    assert list(usable_boundaries(groups, there, limit)) == wanted
    assert usable_boundary(groups, there, limit) == (wanted[0] if wanted else 0)


@given(models())
def test_a_prompt_is_shared_as_far_as_keeping_everything_would_serve(
    case: tuple[list[KvGroup], list[list[bool]], int],
) -> None:
    groups, there, limit = case
    pairs = [pair for pair in zip(groups, there, strict=True) if pair[0].kind != "cross"]
    groups = [group for group, _ in pairs]
    kept = [has if group.keeps_prefix else [True] * limit for group, has in pairs]
    shared = shared_boundary(groups, [has for _, has in pairs], limit)
    others = any(group.keeps_prefix for group in groups)
    assert shared == (max(expected(groups, kept, limit), default=0) if others else 0)


@given(models(), st.data())
def test_a_missing_block_never_moves_the_boundary_up(
    case: tuple[list[KvGroup], list[list[bool]], int], data: st.DataObject
) -> None:
    groups, there, limit = case
    before = usable_boundary(groups, there, limit)
    number = data.draw(st.integers(0, len(groups) - 1))
    if there[number]:
        there[number][data.draw(st.integers(0, len(there[number]) - 1))] = False
    assert usable_boundary(groups, there, limit) <= before


@given(st.lists(group(), min_size=1, max_size=4))
def test_groups_with_other_bytes_have_other_keys(groups: list[KvGroup]) -> None:
    digests = [identity.digest for identity in group_identities(BASE, groups)]
    if len(groups) == 1:
        assert (digests[0] == BASE.digest) == groups[0].keeps_prefix
        return
    assert BASE.digest not in digests
    said = [(each.kind, each.window, each.block_size) for each in groups]
    for one, first in enumerate(said):
        for other, second in enumerate(said):
            assert (digests[one] == digests[other]) == (first == second)


def test_what_was_stored_before_there_were_groups_stays_valid() -> None:
    assert BASE.digest.hex() == OLD_DIGEST


@given(group(), st.integers(1, 64))
def test_a_long_sequence_takes_no_more_than_is_told(one: KvGroup, block_bytes: int) -> None:
    one = evolve(one, block_bytes=block_bytes)
    (told,) = sequence_bytes([one]).values()
    size, kind = one.block_size, one.kind
    if not one.most_blocks:
        assert told == (block_bytes / size, 0)
        return
    # A token reads what is before it, and writes itself, or the state.
    touched = [
        {each // size for each in reads(kind, one.window, token) | {token}}
        for token in range(120, 120 + 41 * size)
    ]
    most = 1 if kind is KvKind.RECURRENT else max(map(len, touched))
    assert told == (0.0 if kind is KvKind.RECURRENT else block_bytes / size, most * block_bytes)


def test_groups_of_one_kind_are_told_together() -> None:
    window = KvGroup(kind=KvKind.SLIDING, block_size=32, window=64, block_bytes=3200)
    full = KvGroup(kind=KvKind.FULL, block_size=32, block_bytes=640)
    unknown = KvGroup(kind=KvKind.LATENT, block_size=32)
    assert sequence_bytes([window, full, window, unknown]) == {
        "sliding 64": (200.0, 2 * 3 * 3200),
        "full": (20.0, 0),
    }
