"""Blocks of one size read into blocks of another: every byte is where its token belongs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator_engine_kit.kv.transfer.protocol import BlockShapes

sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.booleans())


def pool(tokens: int, block: int, runs: int, width: int) -> list[bytearray]:
    """Blocks of a prompt whose byte at (token, run, place) says just that."""
    blocks = []
    for start in range(0, tokens, block):
        content = bytearray()
        for run in range(runs):
            for token in range(start, start + block):
                content += bytes((token * 31 + run * 7 + place) % 251 for place in range(width))
        blocks.append(content)
    return blocks


@given(sizes=sizes, units=st.integers(1, 4), runs=st.integers(1, 5), width=st.integers(1, 3))
def test_pieces_put_every_token_s_bytes_where_the_target_looks_for_them(
    sizes: tuple[int, int, bool], units: int, runs: int, width: int
) -> None:
    small, factor, swapped = sizes
    source, target = (small * factor, small) if swapped else (small, small * factor)
    shapes = BlockShapes(source, target, runs * width, runs)
    tokens = units * shapes.unit_tokens
    assert shapes.aligned(tokens + shapes.unit_tokens - 1) == tokens
    sources = pool(tokens, source, runs, width)
    wanted = pool(tokens, target, runs, width)
    made = [bytearray(b"\xff" * len(block)) for block in wanted]
    for number, content in enumerate(sources):
        in_order = b""
        for piece in shapes.pieces(number):
            data = content[piece.source_offset : piece.source_offset + piece.size_bytes]
            in_order += data
            end = piece.target_offset + piece.size_bytes
            made[shapes.target_block(number) + piece.target_block][piece.target_offset : end] = data
        assert in_order == content, "a checksum over the pieces must be that of the block"
    assert made == wanted
