"""Frames survive any cut of the byte stream, and deltas survive packing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from commutator.engine.protocol import Codec, unpack_delta
from commutator.errors import RequestError
from commutator.frames import FrameProtocol, pack

tokens = st.integers(0, 2**32 - 1)
logprobs = st.builds(
    TokenLogprob,
    token_id=tokens,
    logprob=st.floats(-1e6, 0),
    top=st.lists(st.tuples(tokens, st.floats(-1e6, 0)), max_size=3).map(tuple),
)
deltas = st.builds(
    TokenDelta,
    token_ids=st.lists(tokens, max_size=5).map(tuple),
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    prompt_logprobs=st.lists(
        st.builds(evolve, logprobs, rank=st.none() | st.integers(1, 10**6)), max_size=3
    ).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | tokens | st.text(max_size=5),
    cached_tokens=st.none() | st.integers(0, 10**6),
    error=st.none() | st.text(max_size=9),
    refused=st.booleans(),
)


@given(deltas, st.integers(0, 2**63 - 1))
def test_a_delta_survives_the_wire(delta: TokenDelta, key: int) -> None:
    frames: list[list[Any]] = []
    FrameProtocol(frames.append, print).data_received(
        pack(["deltas", [Codec().pack_delta(key, delta)]])
    )
    ((kind, ((got_key, ids, extras),)),) = frames
    assert (kind, got_key) == ("deltas", key)
    assert unpack_delta(ids, extras) == delta


@given(
    st.builds(
        GenerateRequest,
        request_id=st.text(max_size=5),
        token_ids=st.lists(tokens),
        sampling=st.builds(SamplingParams, max_tokens=st.integers(0, 9)),
        cache_salt=st.none() | st.text(max_size=5),
        generated_prefix=st.integers(0, 9),
    ),
    st.sampled_from([list, tuple, lambda ids: array("I", ids), lambda ids: array("Q", ids)]),
)
def test_a_request_survives_the_wire(request: GenerateRequest, kind: Any) -> None:
    given = evolve(request, token_ids=kind(request.token_ids))
    expected = evolve(request, token_ids=array("I", request.token_ids))
    assert Codec().unpack_request(Codec().pack_request(given)) == expected


@pytest.mark.parametrize("token_ids", [[1, 2**32], [-1], ["a"], [None]])
def test_token_ids_that_are_none_are_refused_before_they_are_sent(token_ids: Sequence[Any]) -> None:
    request = GenerateRequest(request_id="", token_ids=token_ids, sampling=SamplingParams())
    with pytest.raises(RequestError, match="a token id is out of range"):
        Codec().pack_request(request)


def test_tokens_cut_off_in_the_middle_are_refused() -> None:
    request = GenerateRequest(request_id="", token_ids=[1, 2], sampling=SamplingParams())
    rest, data = msgspec.msgpack.decode(Codec().pack_request(request))
    with pytest.raises(ValueError, match="multiple"):
        Codec().unpack_request(msgspec.msgpack.encode([rest, data[:-1]]))


@given(st.lists(st.lists(st.text() | st.integers(-(2**63), 2**64 - 1), min_size=1)), st.data())
def test_frames_survive_any_cut(frames: list[list[Any]], data: st.DataObject) -> None:
    stream = b"".join(pack(frame) for frame in frames)
    got: list[list[Any]] = []
    protocol = FrameProtocol(got.append, print)
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        protocol.data_received(stream[:size])
        stream = stream[size:]
    assert got == frames
