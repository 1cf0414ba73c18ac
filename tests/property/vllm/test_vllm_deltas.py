"""Deltas are the same however the network cuts the stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from commutator.errors import EngineError
from commutator_engine_kit.http import FailedAnswerError
from commutator_vllm.messages import DeltaReader


def asked(*, prompt: int | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=[5, 6, 7],
        sampling=SamplingParams(**sampling),
        prompt_logprobs=prompt,
    )


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(token_ids: Sequence[int], **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "token_ids": list(token_ids), **fields}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}})
DONE = b"data: [DONE]\n\n"
STREAM = (
    chunk([1, 2])
    + b": keep-alive\n\n"
    + chunk([3], stop_reason=None)
    + chunk([4], finish_reason="stop", stop_reason=4)
    + USAGE
    + DONE
)
TOKENS = [1, 2, 3]
"""Of the deltas before the last."""
LAST = TokenDelta(
    token_ids=(4,),
    logprobs=(),
    finish_reason=FinishReason.STOP,
    stop_reason=4,
    cached_tokens=32,
)


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    """Of deltas that have nothing else."""
    assert all(delta == TokenDelta(token_ids=delta.token_ids) for delta in deltas)
    return [token for delta in deltas for token in delta.token_ids]


@given(cuts=st.lists(st.integers(0, len(STREAM))))
def test_cut_anywhere(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = DeltaReader(asked())
    parts = [STREAM[a:b] for a, b in itertools.pairwise(places)]
    found = [list(reader.feed(part)) for part in parts]
    assert all(len(deltas) <= 2 for deltas in found), "what comes together is one delta"
    *before, last = itertools.chain(*found)
    assert tokens(before) == TOKENS
    assert last == LAST
    assert reader.ended


@given(length=st.integers(0, len(STREAM) - 1))
def test_a_stream_that_is_cut_off_has_not_ended(length: int) -> None:
    reader = DeltaReader(asked())
    deltas = list(reader.feed(STREAM[:length]))
    if deltas and deltas[-1] == LAST:
        deltas.pop()
    assert tokens(deltas) == TOKENS[: len(tokens(deltas))]
    assert not reader.ended


def test_without_usage_the_end_is_reported_all_the_same() -> None:
    reader = DeltaReader(asked())
    (delta,) = reader.feed(chunk([1], finish_reason="length") + DONE)
    assert delta == TokenDelta(token_ids=(1,), logprobs=(), finish_reason=FinishReason.LENGTH)


def test_an_error_in_the_stream() -> None:
    reader = DeltaReader(asked())
    with pytest.raises(FailedAnswerError, match="boom") as caught:
        list(reader.feed(event({"error": {"message": "boom", "code": 503}})))
    assert caught.value.status == 503
    with pytest.raises(EngineError, match="cannot be parsed"):
        list(DeltaReader(asked()).feed(b"data: <html>\n\n"))


def test_an_answer_in_one_piece_carries_the_handover() -> None:
    reader = DeltaReader(asked())
    choice = {"token_ids": [7], "finish_reason": "length"}
    body = {"choices": [choice], "kv_transfer_params": {"remote_port": 5}}
    (delta,) = reader.whole(json.dumps(body).encode())
    assert delta.handover == {"remote_port": 5}
    assert delta.finish_reason is FinishReason.LENGTH


def entry(token: int, logprob: float, **more: Any) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, **more}


def test_logprobs_of_both_endpoints() -> None:
    """The chosen token is among the alternatives only when it is one of the likeliest."""
    content = [entry(9, -3.0, top_logprobs=[entry(9, -3.0), entry(1, -0.1), entry(2, -2.0)])]
    lists = {
        "tokens": ["token_id:9"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"token_id:9": -3.0, "token_id:1": -0.1, "token_id:2": -2.0}],
    }
    for logprobs in ({"content": content}, lists):
        (delta,) = DeltaReader(asked(top_logprobs=2)).feed(chunk([9], logprobs=logprobs))
        (told,) = delta.logprobs
        assert (told.token_id, told.logprob) == (9, -3.0)
        assert told.top == ((1, -0.1), (2, -2.0))


@given(data=st.data(), top=st.integers(0, 2))
def test_logprobs_of_a_prompt_are_its_tokens_and_the_likeliest(
    data: st.DataObject, top: int
) -> None:
    """It tells the token, and the likeliest tokens, of which it may be one; both endpoints."""
    values = st.floats(-9, 0, allow_nan=False)
    positions: list[Any] = [None]
    for token in (6, 7):
        others = data.draw(st.dictionaries(st.integers(8, 20), values, min_size=2, max_size=2))
        known = {token: data.draw(values), **others}
        ranks = sorted(known, key=lambda one, known=known: -known[one])  # type: ignore[misc]
        positions.append(
            {
                str(one): {"logprob": value, "rank": ranks.index(one) + 1, "decoded_token": "x"}
                for one, value in known.items()
            }
        )
    choice = {"token_ids": [9], "finish_reason": "length"}
    for body in (
        {"choices": [choice], "prompt_logprobs": positions},
        {"choices": [{**choice, "prompt_logprobs": positions}]},
    ):
        (delta,) = DeltaReader(asked(prompt=top)).whole(json.dumps(body).encode())
        assert [entry.token_id for entry in delta.prompt_logprobs] == [6, 7]
        for entry, position in zip(delta.prompt_logprobs, positions[1:], strict=True):
            assert isinstance(entry, TokenLogprob)
            assert entry.logprob == position[str(entry.token_id)]["logprob"]
            assert entry.rank == position[str(entry.token_id)]["rank"]
            best = sorted((one["logprob"] for one in position.values()), reverse=True)[:top]
            assert [value for _, value in entry.top] == best
