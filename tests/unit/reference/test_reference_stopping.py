"""When a request ends, and why."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest

from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams
from commutator_reference.sampler import Stop, find_stop
from commutator_reference.scheduler import Sequence

EOS = (2, 3)
ALPHABET = "abcdefghij"


def decode(tokens: Many[int]) -> str:
    """Tokens 10 to 19 are letters, 20 is two of them, 30 to 32 an omega byte by byte."""
    pieces = {20: b"xy", 30: b"\xf0\x9d", 31: b"\x9b", 32: b"\x80"}
    raw = b"".join(
        pieces.get(t, ALPHABET[t - 10 : t - 9].encode() if 10 <= t < 20 else b"") for t in tokens
    )
    return raw.decode("utf-8", "replace")


def stop_of(output: list[int], *, prompt: tuple[int, ...] = (1,), **params: Any) -> Stop | None:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    sequence = Sequence.start(
        0, GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling), arrival=0, seed=0
    )
    sequence.tokens += output
    return find_stop(sequence, EOS, 50, decode)


@pytest.mark.parametrize(
    ("output", "params", "wanted"),
    [
        ([5], {}, None),
        ([2], {}, Stop(FinishReason.STOP)),
        ([3], {}, Stop(FinishReason.STOP)),
        ([2], {"stop_token_ids": (2,)}, Stop(FinishReason.STOP)),
        ([2], {"ignore_eos": True}, None),
        ([2], {"ignore_eos": True, "stop_token_ids": (2,)}, Stop(FinishReason.STOP, 2)),
        ([7], {"stop_token_ids": (7, 8)}, Stop(FinishReason.STOP, 7)),
        ([7], {"stop_token_ids": (7,), "min_tokens": 2}, None),
        ([5, 7], {"stop_token_ids": (7,), "min_tokens": 2}, Stop(FinishReason.STOP, 7)),
        ([5, 6], {"max_tokens": 2}, Stop(FinishReason.LENGTH)),
        ([5, 2], {"max_tokens": 2}, Stop(FinishReason.STOP)),
        ([5] * 49, {}, Stop(FinishReason.LENGTH)),
        ([5] * 48, {}, None),
    ],
)
def test_ends(output: list[int], params: dict[str, Any], wanted: Stop | None) -> None:
    assert stop_of(output, **params) == wanted


@pytest.mark.parametrize(
    ("output", "stop", "wanted"),
    [
        ([10, 11], ("ab",), "ab"),
        ([10, 11, 12], ("bc", "c"), "bc"),
        ([10, 11, 12], ("c", "bc"), "c"),
        ([10, 11], ("abc",), None),
        ([20], ("x",), "x"),  # in the middle of a token
        ([10, 20, 11], ("ayb",), None),
        ([10, 20, 11], ("axyb",), "axyb"),
        ([30, 31], ("\U0001d6c0",), None),
        ([30, 31, 32], ("\U0001d6c0",), "\U0001d6c0"),
        ([10, *[4] * 40, 11], ("ab",), "ab"),  # tokens without text between
    ],
)
def test_stop_strings(output: list[int], stop: tuple[str, ...], wanted: str | None) -> None:
    found = stop_of(output, stop=stop)
    assert found == (None if wanted is None else Stop(FinishReason.STOP, wanted))


def test_the_prompt_is_not_looked_at() -> None:
    assert stop_of([11], prompt=(10,), stop=("ab",)) is None


def test_a_string_completed_before_min_tokens_does_not_count_later() -> None:
    assert stop_of([10, 11, 12], stop=("ab",), min_tokens=3) is None
    assert stop_of([10, 11, 10, 11], stop=("ab",), min_tokens=3) == Stop(FinishReason.STOP, "ab")


def test_only_a_short_tail_is_decoded() -> None:
    seen: list[int] = []

    def counting(tokens: Many[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    sampling = SamplingParams(max_tokens=9000, stop=("zz",))
    sequence = Sequence.start(
        0, GenerateRequest(request_id="r", token_ids=(1,), sampling=sampling), arrival=0, seed=0
    )
    sequence.tokens += [10] * 5000
    assert find_stop(sequence, EOS, 9999, counting) is None
    assert sum(seen) < 50
