"""SGLang's host memory as an arena: each page one block, whatever the order within it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commutator.kv import Arena, BlockArena, BlockPart, ScatteredArena
from commutator.transfer import Memory

__all__ = ["Pieces", "page_arena"]

Pieces = Callable[[int], Sequence[tuple[int, int]]]
"""Where a page lies: address and size in bytes of each of its pieces, always in one order."""


def page_arena(pieces: Pieces, pages: int) -> Arena:
    """All pages of a host pool, of which ``pieces`` tells.

    Raises ValueError when the pages of a piece do not follow each other at equal distances.
    """
    parts = [
        BlockPart(address=address, size_bytes=size, stride_bytes=_distance(address, last, pages))
        for (address, size), (last, _) in zip(pieces(0), pieces(pages - 1), strict=True)
    ]
    for page in {0, 1, pages // 2, pages - 1} & set(range(pages)):
        expected = [(part.address + page * part.stride_bytes, part.size_bytes) for part in parts]
        if list(pieces(page)) != expected:
            raise ValueError(f"page {page} of {pages} does not lie where its neighbours say")
    (first, *others) = parts
    if not others and first.stride_bytes in (0, first.size_bytes):
        return BlockArena(
            memory=Memory.DRAM, address=first.address, block_bytes=first.size_bytes, count=pages
        )
    return ScatteredArena(memory=Memory.DRAM, parts=tuple(parts), count=pages)


def _distance(first: int, last: int, pages: int) -> int:
    return (last - first) // max(1, pages - 1)
