"""The addresses of SGLang's pages, compared with NumPy's indexing of the same memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_engine_kit.kv.arena import Arena, BlockArena, ScatteredArena
from commutator_sglang.hicache_pages import page_arena

_ITEM = 4


@st.composite
def pools(draw: st.DrawFn) -> tuple[str, np.ndarray, int]:
    """A host pool as SGLang lays it out: the layout's name, a view by page, and the pages."""
    pages, page, layers, width = (draw(st.integers(1, n)) for n in (6, 4, 3, 5))
    items = 2 * pages * page * layers * width
    memory = np.arange(items, dtype=np.int32)
    layout = draw(st.sampled_from(["layer_first", "page_first", "page_first_direct"]))
    if layout == "layer_first":
        return layout, memory.reshape(2, layers, pages, page, width).transpose(2, 1, 0, 3, 4), pages
    if layout == "page_first":
        return layout, memory.reshape(2, pages, page, layers, width).transpose(1, 0, 2, 3, 4), pages
    return layout, memory.reshape(2, pages, layers, page, width).transpose(1, 0, 2, 3, 4), pages


def pieces(layout: str, pool: np.ndarray, page: int) -> list[tuple[int, int]]:
    """SGLang's pieces of a page: each layer's K and V, or all layers' K and all layers' V."""
    views = [side for layer in pool[page] for side in layer]
    if layout != "layer_first":
        views = list(pool[page])
    return [(view.ctypes.data, view.size * _ITEM) for view in views]


def spans(arena: Arena, page: int) -> list[tuple[int, int]]:
    return [(span.address, span.size_bytes) for span in arena.pieces(arena.span(page))]


@given(pools())
def test_every_page_lies_where_sglang_says(drawn: tuple[str, np.ndarray, int]) -> None:
    layout, pool, pages = drawn
    arena = page_arena(lambda page: pieces(layout, pool, page), pages)
    assert isinstance(arena, ScatteredArena)
    assert arena.count == pages
    assert arena.block_bytes == pool[0].size * _ITEM
    for page in range(pages):
        assert spans(arena, page) == pieces(layout, pool, page)


@given(st.integers(1, 9), st.integers(1, 4096))
def test_pages_in_one_piece_are_a_plain_arena(pages: int, size: int) -> None:
    arena = page_arena(lambda page: [((1 << 20) + page * size, size)], pages)
    assert isinstance(arena, BlockArena)
    for page in range(pages):
        assert spans(arena, page) == [((1 << 20) + page * size, size)]


def test_pages_that_are_scattered_are_refused() -> None:
    places = [0, 4096, 12288, 16384]
    with pytest.raises(ValueError, match="page 1 of 4"):
        page_arena(lambda page: [(places[page], 4096)], 4)
