"""Where the blocks of a KV cache tensor lie, whatever the order of its dimensions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from commutator.kv import BlockPart

__all__ = ["block_parts", "dimensions"]


def block_parts(
    address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, blocks: int
) -> list[BlockPart]:
    """The pieces that every block has in a tensor, in the order of the dimensions outside them.

    ``strides`` are in items. One of the first two dimensions counts the blocks, or a whole multiple
    of them where the attention kernel works with smaller ones. Raises ValueError when blocks are
    not whole ranges of bytes.
    """
    axis, ratio = _block_axis(shape, blocks)
    step = strides[axis]
    dims = [
        (size, stride)
        for number, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if number != axis and size > 1
    ]
    outer = [(size, stride) for size, stride in dims if stride >= step * shape[axis]]
    inner = sorted((stride, size) for size, stride in dims if stride < step * shape[axis])
    items = 1
    for stride, size in inner:
        if stride != items:
            raise ValueError(f"a KV block is not one range of bytes: shape {shape}, {strides}")
        items *= size
    if items > step or (ratio > 1 and items != step):
        raise ValueError(f"KV blocks overlap or have gaps: shape {shape}, strides {strides}")
    return [
        BlockPart(
            address=address
            + sum(index * stride for index, (_, stride) in zip(where, outer, strict=True))
            * item_bytes,
            size_bytes=items * ratio * item_bytes,
            stride_bytes=step * ratio * item_bytes,
        )
        for where in product(*(range(size) for size, _ in outer))
    ]


def dimensions(
    shape: Sequence[int], strides: Sequence[int], blocks: int
) -> list[tuple[int, int, int]]:
    """How a block is laid out, whatever their number: (place in ``shape``, size) from outside in.

    The last number is how many of the kernel's blocks make one of ours.
    """
    axis, ratio = _block_axis(shape, blocks)
    order = sorted(range(len(shape)), key=lambda number: -strides[number])
    return [(number, shape[number], ratio) for number in order if number != axis]


def _block_axis(shape: Sequence[int], blocks: int) -> tuple[int, int]:
    """Which dimension counts blocks, and how many of its own make one of ours."""
    for axis in range(min(2, len(shape))):
        if shape[axis] and shape[axis] % blocks == 0:
            return axis, shape[axis] // blocks
    raise ValueError(f"no dimension of {tuple(shape)} counts {blocks} KV blocks")
