"""Memory in which KV blocks of one size lie side by side: an engine's cache, or staging."""

from __future__ import annotations

import ctypes

from attrs import frozen

from commutator.transfer.spans import Memory, Region, Span

__all__ = ["BlockArena", "bytes_at"]


@frozen(kw_only=True)
class BlockArena:
    """Block ``i`` begins at ``address + i * block_bytes``. Whoever made it keeps it allocated."""

    memory: Memory
    """DRAM or VRAM."""
    address: int
    block_bytes: int
    count: int
    device: int = 0
    """The GPU, for VRAM."""

    @property
    def region(self) -> Region:
        """All of it, to be registered."""
        return Region(self.memory, Span(self.address, self.block_bytes * self.count, self.device))

    @property
    def regions(self) -> list[Region]:
        """The same as a list, of one."""
        return [self.region]

    def pieces(self, span: Span) -> list[Span]:
        """Where the bytes of a block's span lie: there."""
        return [span]

    def address_of(self, block: int) -> int:
        """Where one block begins. Raises IndexError when there is no such block."""
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of {self.count}")
        return self.address + block * self.block_bytes

    def span(self, block: int) -> Span:
        """Where one block lies. Raises IndexError when there is no such block."""
        return Span(self.address_of(block), self.block_bytes, self.device)


def bytes_at(span: Span) -> memoryview:
    """The bytes of a span of DRAM, to read and to write. They must outlive the view."""
    return memoryview((ctypes.c_ubyte * span.size_bytes).from_address(span.address)).cast("B")
