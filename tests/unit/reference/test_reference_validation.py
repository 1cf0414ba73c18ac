"""Requests that can never be served are refused with the parameter's name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator_reference.sampler import validate_request


def check(request: GenerateRequest, *, can_decode: bool = True) -> None:
    validate_request(request, vocab_size=100, max_model_len=32, can_decode=can_decode)


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    params = SamplingParams(**(sampling or {}))
    return GenerateRequest(request_id="r", **{"token_ids": [1, 2], "sampling": params, **fields})


def test_ordinary_requests_pass() -> None:
    check(request())
    check(request({"stop": ("a",), "top_logprobs": 100, "logit_bias": {99: -5}, "seed": -3}))
    check(request(token_ids=[0] * 31, data_parallel_rank=0, cache_salt="s", priority=-9))


@pytest.mark.parametrize(
    ("param", "bad"),
    [
        ("prompt", request(token_ids=[])),
        ("prompt", request(token_ids=[1] * 32)),
        ("prompt", request(token_ids=[1, 100])),
        ("prompt", request(token_ids=[-1])),
        ("stop_token_ids", request({"stop_token_ids": (100,)})),
        ("stop", request({"stop": ("a", "")})),
        ("logit_bias", request({"logit_bias": {100: 1.0}})),
        ("logit_bias", request({"logit_bias": {1: math.nan}})),
        ("max_tokens", request({"max_tokens": 0})),
        ("min_tokens", request({"min_tokens": 17})),
        ("temperature", request({"temperature": -0.1})),
        ("temperature", request({"temperature": math.nan})),
        ("top_p", request({"top_p": 0.0})),
        ("top_p", request({"top_p": 1.1})),
        ("top_k", request({"top_k": -1})),
        ("min_p", request({"min_p": 2.0})),
        ("repetition_penalty", request({"repetition_penalty": 0.0})),
        ("presence_penalty", request({"presence_penalty": math.inf})),
        ("frequency_penalty", request({"frequency_penalty": math.nan})),
        ("top_logprobs", request({"top_logprobs": 101})),
        ("data_parallel_rank", request(data_parallel_rank=1)),
    ],
)
def test_wrong_values_are_refused_by_name(param: str, bad: GenerateRequest) -> None:
    with pytest.raises(RequestError) as refused:
        check(bad)
    assert refused.value.param == param


def test_an_overlong_prompt_is_refused_with_both_lengths() -> None:
    with pytest.raises(RequestError, match=r"40 tokens.* 32 in all") as refused:
        check(request(token_ids=[1] * 40))
    assert refused.value.code == "context_length_exceeded"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="without a tokenizer"):
        check(request({"stop": ("a",)}), can_decode=False)
