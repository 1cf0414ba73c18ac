"""Events are complete, however the connection cuts their bytes."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from commutator.errors import EngineError
from commutator_engine_kit.completions import JsonEvents, decoded

DONE = b"[DONE]"
payloads = st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1))


@given(payloads, st.lists(st.integers(0, 400)), st.booleans())
def test_cut_anywhere(texts: list[str], cuts: list[int], spaced: bool) -> None:
    told = [msgspec.json.encode(text) for text in texts]
    field = b"data: " if spaced else b"data:"
    sent = b"".join(b": alive\n\n" + field + payload + b"\n\n" for payload in told) + field + DONE
    places = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    events, got = JsonEvents("X", msgspec.json.Decoder(str)), list[str | None]()
    for begin, end in itertools.pairwise(places):
        got += events.feed(sent[begin:end])
    assert got == texts, "the last event is not complete yet"
    assert list(events.feed(b"\n\n")) == [None]


sent_events = st.lists(
    st.sampled_from([
        b"data: [DONE]", b"data:[DONE]", b"data: 1 ", b'data: {"x":"\\n\\ndata: 2"}', b"data: ",
        b": alive", b"data: 1\ndata: 2", b"event: x\ndata: 1", b'data: {"x":\n1}', b"data: nul",
        b"",
    ])
)  # fmt: skip


@given(sent_events, st.lists(st.integers(0, 200)))
@example(sent=[b"data: 1", b"", b"data: [DONE]"], cuts=[10])
def test_events_that_come_together_are_decoded_as_each_alone(
    sent: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(event + b"\n\n" for event in sent)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    decoder = msgspec.json.Decoder()
    each, got = list[Any](), list[Any]()
    with suppress(EngineError):
        for event in data.split(b"\n\n"):
            if event.startswith(b"data:"):
                payload = event[5:].strip()
                each.append(None if payload == DONE else decoded("X", payload, decoder.decode))
    events: JsonEvents[Any] = JsonEvents("X", decoder)
    with suppress(EngineError):
        for begin, end in itertools.pairwise(places):
            for value in events.feed(data[begin:end]):
                got.append(value)
    assert got == each
