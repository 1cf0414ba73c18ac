"""Events are complete, however the connection cuts their bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from commutator.engine.http import ServerEvents

DONE = b"[DONE]"
payloads = st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1))


@given(payloads, st.lists(st.integers(0, 400)), st.booleans())
def test_cut_anywhere(texts: list[str], cuts: list[int], spaced: bool) -> None:
    told = [text.encode() for text in texts]
    field = b"data: " if spaced else b"data:"
    sent = b"".join(b": alive\n\n" + field + payload + b"\n\n" for payload in told) + field + DONE
    places = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    events, got = ServerEvents(), list[bytes]()
    for begin, end in itertools.pairwise(places):
        got += events.feed(sent[begin:end])
    assert got == told, "the last event is not complete yet"
    assert list(events.feed(b"\n\n")) == [DONE]
