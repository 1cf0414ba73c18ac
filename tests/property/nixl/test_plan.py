"""Every plan moves each byte once, to its place, within the limits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.tier import Memory, Region, Span
from commutator_engine_kit.nixl.agent import BlockList
from commutator_engine_kit.nixl.moves import Batch, BlockMove, plan_batches

# Small numbers, so that blocks often touch; a gap of 0 on both sides makes them contiguous.
GAPS = st.sampled_from([0, 0, 0, 1, 5])


@st.composite
def move_lists(draw: st.DrawFn) -> list[BlockMove]:
    moves: list[BlockMove] = []
    local_end, remote_end = 100, 0
    for _ in range(draw(st.integers(0, 30))):
        size = draw(st.integers(1, 8))
        local = Span(local_end + draw(GAPS), size)
        remote = Span(remote_end + draw(GAPS), size, draw(st.sampled_from([3, 3, 3, 4])))
        own = draw(st.sampled_from([False, False, True]))
        moves.append(
            BlockMove(
                local, remote, Region(memory=Memory.OBJ, span=remote, name="key") if own else None
            )
        )
        local_end, remote_end = local.address + size, remote.address + size
    return draw(st.permutations(moves)) if draw(st.booleans()) else moves


LIMITS = st.integers(0, 40)


def bytes_moved(local: tuple[Span, ...], remote: tuple[Span, ...]) -> list[tuple[int, int, int]]:
    """One entry for each byte: where on this side, on which device and where on the other."""
    return [
        (one.address + offset, other.device, other.address + offset)
        for one, other in zip(local, remote, strict=True)
        for offset in range(one.size_bytes)
    ]


def bytes_wanted(moves: list[BlockMove]) -> list[tuple[int, int, int]]:
    return bytes_moved(tuple(m.local for m in moves), tuple(m.remote for m in moves))


@given(move_lists(), LIMITS)
def test_every_byte_is_moved_once_and_in_order(moves: list[BlockMove], limit: int) -> None:
    batches = plan_batches(moves, range(len(moves)), limit)
    assert [index for batch in batches for index in batch.indices] == list(range(len(moves)))
    planned = [byte for batch in batches for byte in bytes_moved(batch.local, batch.remote)]
    assert planned == bytes_wanted(moves)
    for batch in batches:
        chosen = [moves[index] for index in batch.indices]
        assert bytes_moved(batch.local, batch.remote) == bytes_wanted(chosen)


@given(move_lists(), LIMITS)
def test_limits_are_kept_and_batches_are_full(moves: list[BlockMove], limit: int) -> None:
    batches = plan_batches(moves, range(len(moves)), limit)
    for batch in batches:
        assert batch.size_bytes == sum(span.size_bytes for span in batch.local)
        assert batch.size_bytes <= limit or len(batch.indices) == 1
    for first, second in pairwise(batches):
        if not (first.regions or second.regions):
            assert first.size_bytes + moves[second.indices[0]].local.size_bytes > limit


@given(move_lists(), LIMITS)
def test_an_object_is_a_transfer_of_its_own(moves: list[BlockMove], limit: int) -> None:
    """NIXL reports the first failure of several, and goes on with the others' memory unseen."""
    for batch in plan_batches(moves, range(len(moves)), limit):
        assert not batch.regions or len(batch.indices) == 1


@given(move_lists(), LIMITS)
def test_what_touches_is_merged(moves: list[BlockMove], limit: int) -> None:
    for batch in plan_batches(moves, range(len(moves)), limit):
        chosen = [moves[index] for index in batch.indices]
        assert batch.regions == tuple(m.region for m in chosen if m.region is not None)
        breaks = sum(not contiguous(a, b) for a, b in pairwise(chosen))
        assert len(batch.local) == len(batch.remote) == breaks + 1


def contiguous(first: BlockMove, second: BlockMove) -> bool:
    return (
        first.remote.device == second.remote.device
        and first.local.address + first.local.size_bytes == second.local.address
        and first.remote.address + first.remote.size_bytes == second.remote.address
    )


@given(move_lists(), st.data())
def test_some_of_the_blocks(moves: list[BlockMove], data: st.DataObject) -> None:
    wanted = data.draw(
        st.lists(st.integers(0, len(moves) - 1), unique=True) if moves else st.just([])
    )
    batches: list[Batch] = plan_batches(moves, wanted, 0)
    assert [batch.indices for batch in batches] == [(index,) for index in wanted]


@given(
    base=st.integers(0, 5), block=st.integers(1, 4), count=st.integers(0, 6),
    spare=st.integers(0, 3),
    asked=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(0, 1)), max_size=4),
)  # fmt: skip
def test_a_prepared_list_answers_only_for_its_own_whole_blocks(
    base: int, block: int, count: int, spare: int, asked: list[tuple[int, int, int]]
) -> None:
    region = Span(base, block * count + min(spare, block - 1))
    blocks = BlockList(Memory.DRAM, region, block, "UCX", "me")
    whole = {
        Span(base + first * block, (end - first) * block): range(first, end)
        for first in range(count)
        for end in range(first + 1, count + 1)
    }
    spans = [Span(*each) for each in asked]
    expected = (
        [index for span in spans for index in whole[span]]
        if all(span in whole for span in spans)
        else None
    )
    assert blocks.indices(spans) == expected
