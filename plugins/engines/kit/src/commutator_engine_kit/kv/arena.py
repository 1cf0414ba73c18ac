"""Memory that holds KV blocks of one size: an engine's cache, or staging memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import xxhash
from attrs import frozen

from commutator.contract.tier import Memory, Region, Span


@frozen(kw_only=True)
class BlockArena:
    """Contiguous blocks: block ``i`` begins at ``address + i * block_bytes``.

    The creator keeps the memory allocated.
    """

    memory: Memory
    """DRAM or VRAM."""
    address: int
    block_bytes: int
    count: int
    device: int = 0
    """The GPU, for VRAM."""

    @property
    def region(self) -> Region:
        """All of it, for registration with NIXL."""
        return Region(
            memory=self.memory, span=Span(self.address, self.block_bytes * self.count, self.device)
        )

    @property
    def regions(self) -> list[Region]:
        """``region`` as a list."""
        return [self.region]

    def pieces(self, span: Span) -> list[Span]:
        """The memory of a block's span: the span itself."""
        return [span]

    def address_of(self, block: int) -> int:
        """The address of a block. Raises IndexError when there is no such block."""
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of {self.count}")
        return self.address + block * self.block_bytes

    def span(self, block: int) -> Span:
        """The memory of a block. Raises IndexError when there is no such block."""
        return Span(self.address_of(block), self.block_bytes, self.device)


def bytes_at(span: Span) -> memoryview:
    """A writable view of a span of DRAM. The memory must outlive the view."""
    return memoryview((ctypes.c_ubyte * span.size_bytes).from_address(span.address)).cast("B")


@frozen(kw_only=True)
class BlockPart:
    """One piece of every block: block ``i``'s begins at ``address + i * stride_bytes``."""

    address: int
    size_bytes: int
    stride_bytes: int


@frozen(kw_only=True)
class ScatteredArena:
    """Blocks that consist of parts in several places of memory.

    ``span`` returns a virtual span, as if the blocks were contiguous from address 0; ``pieces``
    maps it to memory. Such blocks reach all but memory tiers through staging memory.
    """

    memory: Memory
    """DRAM or VRAM."""
    parts: tuple[BlockPart, ...]
    """In the same order in all engines that share the blocks."""
    count: int
    device: int = 0
    """The GPU, for VRAM."""

    @property
    def block_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def regions(self) -> list[Region]:
        """All the memory, for registration with NIXL; interleaved parts are one region."""
        last = self.count - 1
        ranges = [
            (part.address, part.address + part.stride_bytes * last + part.size_bytes)
            for part in self.parts
        ]
        return [
            Region(memory=self.memory, span=Span(start, end - start, self.device))
            for start, end in _merged(ranges)
        ]

    def span(self, block: int) -> Span:
        """The virtual span of a block. Raises IndexError when there is no such block."""
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of {self.count}")
        return Span(block * self.block_bytes, self.block_bytes, self.device)

    def pieces(self, span: Span) -> list[Span]:
        """The memory of a whole block, given its virtual span."""
        block = span.address // self.block_bytes
        return [
            Span(part.address + block * part.stride_bytes, part.size_bytes, self.device)
            for part in self.parts
        ]


Arena = BlockArena | ScatteredArena
"""The memory of an engine's blocks."""


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping ranges. Adjacent ones stay apart: they may be separate allocations."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""xxh3_64 of a bytes-like object, as an unsigned integer."""
