"""A vLLM worker's KV memory: its blocks in tensors of any layout, and fences for its device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from commutator import Memory
from commutator.errors import ConfigError
from commutator_engine_kit.kv import BlockPart, ScatteredArena


def arena_of(caches: dict[str, Any], blocks: int) -> tuple[ScatteredArena, str]:
    """The worker's KV tensors as an arena, and a description of their layout.

    Layers may share a tensor; layers of different groups may use the same bytes, because a block
    belongs to one group at a time. Raises ConfigError when a layer has no KV tensor, or when such
    layers divide the bytes into different blocks.
    """
    import torch

    parts: list[BlockPart] = []
    layout = []
    for name, cache in sorted(caches.items()):
        if not isinstance(cache, torch.Tensor):
            raise ConfigError([f"layer {name} has no tensor of keys and values"], "vLLM's KV cache")
        pieces = block_parts(
            cache.data_ptr(), cache.shape, cache.stride(), cache.element_size(), blocks
        )
        for piece in pieces:
            overlay(parts, piece, blocks)
        sizes = [(part.size_bytes, cache.dtype) for part in pieces]
        layout.append(f"{name} {dimensions(cache.shape, cache.stride(), blocks)} {sizes}")
    first = next(iter(caches.values()))
    on_cpu = first.device.type == "cpu"
    if on_cpu:  # the order within a block depends on the instructions that attention uses
        amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - torch has no public function
        layout.append(f"{torch.backends.cpu.get_cpu_capability()} amx={amx}")
    arena = ScatteredArena(
        memory=Memory.DRAM if on_cpu else Memory.VRAM,
        parts=tuple(parts),
        count=blocks,
        device=first.device.index or 0,
    )
    return arena, "; ".join(layout)


def overlay(parts: list[BlockPart], piece: BlockPart, blocks: int) -> None:
    """Add a piece of every block to ``parts``, or extend the part that has some of its bytes.

    Raises ConfigError when the piece overlaps parts of other blocks.
    """
    for part in parts:
        union = _union(part, piece, blocks)
        if union == part:
            return
        if union is not None:
            parts.remove(part)
            overlay(parts, union, blocks)
            return
    parts.append(piece)


def _union(one: BlockPart, other: BlockPart, blocks: int) -> BlockPart | None:
    """Both as one part of every block; None if they have no byte in common."""
    first, second = sorted((one, other), key=lambda part: part.address)
    stride_bytes = first.stride_bytes
    distance = second.address - first.address
    if distance >= stride_bytes * (blocks - 1) + first.size_bytes:
        return None
    size_bytes = max(first.size_bytes, distance + second.size_bytes)
    if second.stride_bytes != stride_bytes or size_bytes > stride_bytes:
        raise ConfigError(
            ["layers of different groups divide the same memory into different blocks"],
            "vLLM's KV cache",
        )
    if distance >= first.size_bytes:
        return None  # side by side in each block
    return BlockPart(address=first.address, size_bytes=size_bytes, stride_bytes=stride_bytes)


def block_parts(
    address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, blocks: int
) -> list[BlockPart]:
    """The byte ranges that make up each block, in the order of the outer dimensions.

    ``strides`` are in items. One of the first two dimensions counts the blocks, or a multiple of
    them when the attention kernel uses smaller blocks. Raises ValueError when a block does not
    consist of contiguous ranges of bytes.
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
            raise ValueError(f"a KV block is not contiguous: shape {shape}, strides {strides}")
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
    """The layout of one block, independent of the number of blocks.

    For each dimension from the outermost: (index in ``shape``, size, kernel blocks per KV block).
    """
    axis, ratio = _block_axis(shape, blocks)
    order = sorted(range(len(shape)), key=lambda number: -strides[number])
    return [(number, shape[number], ratio) for number in order if number != axis]


def _block_axis(shape: Sequence[int], blocks: int) -> tuple[int, int]:
    """The dimension that counts blocks, and the number of kernel blocks per KV block."""
    for axis in range(min(2, len(shape))):
        if shape[axis] and shape[axis] % blocks == 0:
            return axis, shape[axis] // blocks
    raise ValueError(f"no dimension of {tuple(shape)} counts {blocks} KV blocks")
