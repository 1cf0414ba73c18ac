"""The stream of one request's deltas between a connection and a slow reader."""

from __future__ import annotations

import pytest

from commutator.contract.request import FinishReason, TokenDelta, TokenLogprob
from commutator.engine.protocol import DeltaStream


@pytest.mark.security
async def test_what_nobody_reads_is_merged_and_complete() -> None:
    stream = DeltaStream(lambda: None)
    for number in range(10_000):
        entry = TokenLogprob(token_id=number, logprob=-1.0, top=())
        cached = 7 if number == 0 else None
        stream.feed(TokenDelta(token_ids=(number,), logprobs=(entry,), cached_tokens=cached))
        assert stream.unread <= 64
    stream.feed(TokenDelta(finish_reason=FinishReason.STOP, stop_reason="end"))
    deltas = [delta async for delta in stream]
    assert [token for delta in deltas for token in delta.token_ids] == list(range(10_000))
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == list(range(10_000))
    assert deltas[0].cached_tokens == 7
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "end")
