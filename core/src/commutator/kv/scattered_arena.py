"""Memory of an engine that keeps a KV block in several pieces, such as keys and values by layer."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from commutator.kv.arena import BlockArena
from commutator.transfer.spans import Memory, Region, Span

__all__ = ["Arena", "BlockPart", "ScatteredArena"]


@frozen(kw_only=True)
class BlockPart:
    """A piece of every block: that of block ``i`` begins at ``address + i * stride_bytes``."""

    address: int
    size_bytes: int
    stride_bytes: int


@frozen(kw_only=True)
class ScatteredArena:
    """Blocks whose bytes are those of their parts, one after another.

    ``span`` names a block in a numbering of its own, as if the blocks lay side by side from address
    0; only ``pieces`` tells where its bytes are. So they reach every tier through staging memory.
    """

    memory: Memory
    """DRAM or VRAM."""
    parts: tuple[BlockPart, ...]
    """In an order that all engines which share the blocks agree on."""
    count: int
    device: int = 0
    """The GPU, for VRAM."""

    @property
    def block_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def regions(self) -> list[Region]:
        """All the memory, to be registered; parts that are interleaved are one region."""
        last = self.count - 1
        ranges = [
            (part.address, part.address + part.stride_bytes * last + part.size_bytes)
            for part in self.parts
        ]
        return [
            Region(self.memory, Span(start, end - start, self.device))
            for start, end in _merged(ranges)
        ]

    def span(self, block: int) -> Span:
        """The block's name for ``pieces``. Raises IndexError when there is no such block."""
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of {self.count}")
        return Span(block * self.block_bytes, self.block_bytes, self.device)

    def pieces(self, span: Span) -> list[Span]:
        """Where the bytes of a whole block, named by ``span``, lie."""
        block = span.address // self.block_bytes
        return [
            Span(part.address + block * part.stride_bytes, part.size_bytes, self.device)
            for part in self.parts
        ]


Arena = BlockArena | ScatteredArena
"""Where an engine keeps its blocks."""


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that overlap become one; those that only touch may be allocations of their own."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
