"""Events come out whole, wherever a connection cuts them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from commutator.engine.server_events import DONE, ServerEvents

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
    assert got == told, "the last event is not whole yet"
    assert list(events.feed(b"\n\n")) == [DONE]
