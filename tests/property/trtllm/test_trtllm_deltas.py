"""An answer is the same however its bytes are cut."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.request import FinishReason, TokenDelta
from commutator.errors import EngineError
from commutator_engine_kit.http import FailedAnswerError
from commutator_trtllm.messages import DeltaReader

ids = st.lists(st.integers(0, 1 << 20), max_size=4)


def events(*payloads: Any) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(payload) + b"\n\n" for payload in payloads)


def choice(token_ids: list[int] | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": token_ids, "finish_reason": reason, **more}]}


USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}
DONE = b"data: [DONE]\n\n"


@given(
    st.lists(ids, min_size=1, max_size=5), st.lists(st.integers(0, 400), max_size=6), st.booleans()
)
def test_cut_anywhere(chunks: list[list[int]], cuts: list[int], spaced: bool) -> None:
    *first, last = chunks
    body = events(*map(choice, first), choice(last, "stop", stop_reason=5), USAGE) + DONE
    if spaced:  # some of its chunks end with a blank
        body = body.replace(b"}\n\n", b"} \n\n")
    reader, got = DeltaReader(), list[TokenDelta]()
    places = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    for start, end in itertools.pairwise(places):
        got += reader.feed(body[start:end])
    assert [token for delta in got for token in delta.token_ids] == [*itertools.chain(*chunks)]
    assert len(got) <= len(places)  # tokens that come together are one delta; the last is its own
    assert reader.ended
    assert (got[-1].finish_reason, got[-1].stop_reason) == (FinishReason.STOP, 5)
    assert got[-1].cached_tokens == 32


def test_an_answer_without_its_end_is_not_complete() -> None:
    reader = DeltaReader()
    assert [*reader.feed(events(choice([1]), choice([2], "length")))] == [
        TokenDelta(token_ids=(1,))
    ]
    assert reader.began
    assert not reader.ended


def test_no_logprobs_for_a_token_is_an_error() -> None:
    chunk = choice([1, 2], logprobs={"token_logprobs": [-1.0]})
    with pytest.raises(EngineError, match="1 logprobs for 2 tokens"):
        list(DeltaReader().feed(events(chunk)))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"object": "error", "message": "too long", "code": 400}, "too long"),
        ({"error": "Extra inputs"}, "Extra inputs"),
        ({"error": {"message": "of a proxy"}}, "of a proxy"),
    ],
)
def test_what_an_error_says(body: dict[str, Any], said: str) -> None:
    with pytest.raises(FailedAnswerError, match=said):
        list(DeltaReader().feed(events(body)))


def test_a_chunk_without_an_error_is_none() -> None:
    assert list(DeltaReader().feed(events({"choices": []}))) == []


@pytest.mark.parametrize("body", [b"data: {\n\n", b'data: {"choices": 3}\n\n'])
def test_what_is_not_understood(body: bytes) -> None:
    with pytest.raises(EngineError, match="cannot be parsed"):
        list(DeltaReader().feed(body))
