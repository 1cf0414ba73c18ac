"""A vLLM worker's KV memory: its blocks in tensors of any layout, and fences for its device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from commutator import Memory
from commutator.errors import ConfigError
from commutator_engine_kit.kv import BlockPart, ScatteredArena

__all__ = ["arena_of", "block_parts", "dimensions"]


def arena_of(caches: dict[str, Any], blocks: int) -> tuple[ScatteredArena, str]:
    """The worker's KV tensors as an arena, and a description of their layout.

    Layers may share a tensor. Raises ConfigError when a layer has no KV tensor.
    """
    import torch

    parts: dict[int, list[BlockPart]] = {}
    layout = []
    for name, cache in sorted(caches.items()):
        if not isinstance(cache, torch.Tensor):
            raise ConfigError([f"layer {name} has no tensor of keys and values"], "vLLM's KV cache")
        pieces = block_parts(
            cache.data_ptr(), cache.shape, cache.stride(), cache.element_size(), blocks
        )
        parts.setdefault(cache.data_ptr(), pieces)
        sizes = [(part.size_bytes, cache.dtype) for part in pieces]
        layout.append(f"{name} {dimensions(cache.shape, cache.stride(), blocks)} {sizes}")
    first = next(iter(caches.values()))
    on_cpu = first.device.type == "cpu"
    if on_cpu:  # the order within a block depends on the instructions that attention uses
        amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - torch has no public function
        layout.append(f"{torch.backends.cpu.get_cpu_capability()} amx={amx}")
    arena = ScatteredArena(
        memory=Memory.DRAM if on_cpu else Memory.VRAM,
        parts=tuple(part for pieces in parts.values() for part in pieces),
        count=blocks,
        device=first.device.index or 0,
    )
    return arena, "; ".join(layout)


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
