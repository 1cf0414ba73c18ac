"""When a request has said enough."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many

from attrs import frozen

from commutator.types import FinishReason, SamplingParams
from commutator_reference.sequence import Sequence

__all__ = ["Decode", "Stop", "find_stop", "stop_ids"]

Decode = Callable[[Many[int]], str]
"""Text of some tokens; a token that is only part of a character may give a replacement mark."""

_SPARE_TOKENS = 8
"""Decoded beyond a stop string's length, for tokens that add no text."""


@frozen
class Stop:
    """Why a request ends with its newest token."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


def stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The tokens that end this request."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def find_stop(
    sequence: Sequence,
    eos_token_ids: Collection[int],
    max_model_len: int,
    decode: Decode | None,
) -> Stop | None:
    """Whether the newest token ends the request. Before ``min_tokens`` nothing but length does.

    The ending token stays in the output; ``stop_reason`` names a stop id or string, and is None
    for the end-of-sequence token, as in vLLM.
    """
    params, token = sequence.sampling, sequence.tokens[-1]
    if sequence.output_length >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token in params.stop_token_ids:
            return Stop(FinishReason.STOP, token)
        if params.stop and decode is not None:
            found = _completed_stop_string(sequence, params.stop, decode)
            if found is not None:
                return Stop(FinishReason.STOP, found)
    is_full = len(sequence.tokens) >= max_model_len
    if is_full or sequence.output_length >= params.max_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def _completed_stop_string(sequence: Sequence, stop: tuple[str, ...], decode: Decode) -> str | None:
    """The first of the stop strings that the newest token completed."""
    tail, text = _tail(sequence, max(map(len, stop)), decode)
    candidates = [string for string in stop if string in text]
    if not candidates:
        return None
    # It may have been there already, before min_tokens were reached.
    before = decode(tail[:-1])
    return next((s for s in candidates if text.count(s) > before.count(s)), None)


def _tail(sequence: Sequence, characters: int, decode: Decode) -> tuple[list[int], str]:
    """The last output tokens, enough for ``characters`` characters of text, and that text."""
    length = characters + _SPARE_TOKENS
    while True:
        start = max(sequence.prompt_length, len(sequence.tokens) - length)
        tail = sequence.tokens[start:]
        text = decode(tail)
        if len(text) >= characters + _SPARE_TOKENS or start == sequence.prompt_length:
            return tail, text
        length *= 2
