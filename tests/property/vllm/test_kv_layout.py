"""The addresses of a tensor's KV blocks, compared with NumPy's indexing of the same memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_vllm.kv_memory import block_parts, dimensions


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A tensor [2, blocks, ...] or [blocks, ...] in any memory order that keeps blocks whole."""
    blocks, ratio = draw(st.integers(3, 6)), draw(st.integers(1, 2))
    inner = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sides = draw(st.sampled_from([(), (2,)]))
    inside = draw(st.permutations(range(len(inner))))
    # In memory: the two sides outside the blocks or inside them, then what is in a block.
    sides_inside = bool(sides) and draw(st.booleans()) and ratio == 1
    gap = draw(st.integers(0, 2)) if ratio == 1 and not (sides and not sides_inside) else 0
    stored = [inner[number] for number in inside]
    count = blocks * ratio
    if sides_inside:
        items = 2 * int(np.prod(stored))
        memory = np.arange(count * (items + gap), dtype=np.int32)
        whole = memory.reshape(count, items + gap)[:, :items].reshape(count, 2, *stored)
        tensor = whole.swapaxes(0, 1)
    else:
        items = int(np.prod(stored))
        memory = np.arange((2 if sides else 1) * count * (items + gap), dtype=np.int32)
        shape = (*sides, count, items + gap)
        tensor = memory.reshape(shape)[..., :items].reshape(*sides, count, *stored)
    lead = len(sides) + 1
    back = [lead + inside.index(number) for number in range(len(inner))]
    return tensor.transpose(*range(lead), *back), blocks, ratio


@given(tensors())
def test_parts_are_the_bytes_of_each_block(made: tuple[np.ndarray, int, int]) -> None:
    tensor, blocks, ratio = made
    base = tensor.__array_interface__["data"][0]
    strides = [stride // tensor.itemsize for stride in tensor.strides]
    axis = 0 if tensor.shape[0] == blocks * ratio else 1
    parts = block_parts(0, tensor.shape, strides, tensor.itemsize, blocks)
    whole: np.ndarray = tensor.base if isinstance(tensor.base, np.ndarray) else tensor
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = (base - whole.__array_interface__["data"][0]) // tensor.itemsize
    memory = whole.reshape(-1)
    for block in range(blocks):
        where = (slice(None),) * axis + (slice(block * ratio, (block + 1) * ratio),)
        expected = sorted(tensor[where].reshape(-1).tolist())
        found: list[int] = []
        for part in parts:
            first = start + (part.address + block * part.stride_bytes) // tensor.itemsize
            found += memory[first : first + part.size_bytes // tensor.itemsize].tolist()
        assert sorted(found) == expected


def test_dimensions_do_not_depend_on_the_number_of_blocks() -> None:
    few = dimensions((2, 5, 3, 4), (60, 12, 4, 1), 5)
    many = dimensions((2, 9, 3, 4), (108, 12, 4, 1), 9)
    assert few == many
    assert dimensions((2, 5, 3, 4), (60, 12, 1, 3), 5) != few


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 7, 2), (14, 2, 1)), ((5, 3, 2), (12, 4, 1)), ((5, 3, 2), (3, 2, 1))],
    ids=["no axis of blocks", "gaps within", "overlapping"],
)
def test_other_layouts_are_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="block"):
        block_parts(0, shape, strides, 4, 5)
