"""Requests as TensorRT-LLM's /v1/completions takes them."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from tests.support.trtllm.requests import read_request

from commutator import Constraint
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator_engine_kit.completions import request_headers
from commutator_trtllm.messages import check_forwarded, request_body

EVERYTHING = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=1 << 60,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={5: -3.5},
    top_logprobs=0,
    stop=("x", "y"),
    stop_token_ids=(8, 9),
    ignore_eos=True,
)
REQUEST = GenerateRequest(request_id="r", token_ids=[1, 2, 3], sampling=EVERYTHING)


def no_text(_: Any) -> list[int]:
    raise AssertionError("only tokens are sent")


def test_every_parameter_arrives() -> None:
    """The stand-in reads the body, and refuses parameters that the server does not know."""
    body = request_body(REQUEST, "m")
    read = read_request(body, "r", chat=False, tokenize=no_text)
    assert read.sampling == EVERYTHING
    assert read.token_ids == [1, 2, 3]
    assert body["detokenize"] is False
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_defaults_are_written_out() -> None:
    """The server would choose a parameter that is left out."""
    body = request_body(evolve(REQUEST, sampling=SamplingParams()), "m")
    assert body["temperature"] == 1.0
    assert body["top_k"] == 0
    assert not {"seed", "logprobs", "stop", "logit_bias"} & set(body)


def test_of_a_continued_answer_the_limits_are_what_is_left() -> None:
    body = request_body(evolve(REQUEST, generated_prefix=1), "m")
    assert (body["max_tokens"], body["min_tokens"]) == (8, 1)


def test_its_own_parameters_are_relayed() -> None:
    assert request_body(evolve(REQUEST, options={"top_p_min": 0.1}), "m")["top_p_min"] == 0.1


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint(kind="json_object"), {"type": "json_object"}),
        (
            Constraint(kind="json_schema", value='{"type":"null"}'),
            {"type": "json", "schema": {"type": "null"}},
        ),
        (Constraint(kind="regex", value="a+"), {"type": "regex", "regex": "a+"}),
        (Constraint(kind="choice", value=("a.", "b")), {"type": "regex", "regex": "(a\\.|b)"}),
        (Constraint(kind="grammar", value="g"), {"type": "ebnf", "ebnf": "g"}),
        (
            Constraint(kind="structural_tag", value='{"type":"structural_tag","format":{}}'),
            {"type": "structural_tag", "format": {}},
        ),
    ],
)
def test_constraints_in_its_words(constraint: Constraint, told: dict[str, Any]) -> None:
    body = request_body(evolve(REQUEST, constraint=constraint), "m")
    assert body["response_format"] == told


def test_the_prefill_leg_is_no_stream() -> None:
    words = {"request_type": "context_only", "disagg_request_id": 1 << 62}
    body = request_body(evolve(REQUEST, handover=words), "m")
    assert body["stream"] is False
    assert "stream_options" not in body
    assert body["disaggregated_params"] == words
    words = {**words, "request_type": "generation_only"}
    assert request_body(evolve(REQUEST, handover=words), "m")["stream"] is True


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"cache_salt": "tenant"}, "cache_salt"),
        ({"constraint": Constraint(kind="regex", value="a", after=(7,))}, "response_format"),
        ({"constraint": Constraint(kind="json_object", whitespace="")}, "response_format"),
        (
            {"constraint": Constraint(kind="json_object"), "generated_prefix": 1},
            "response_format",
        ),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling": SamplingParams(top_logprobs=2)}, "top_logprobs"),
    ],
)
def test_what_it_has_no_words_for_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        request_body(evolve(REQUEST, **changes), "m")
    assert refused.value.param == param


def test_headers() -> None:
    headers = request_headers(evolve(REQUEST, traceparent="00-1-2-01"))
    assert headers == {"X-Request-Id": "r", "traceparent": "00-1-2-01"}


@pytest.mark.security
def test_a_salt_that_the_server_ignores_is_refused_in_bodies_that_pass_through() -> None:
    check_forwarded(b'{"model": "m", "cache_salt": null, "tools": []}')
    with pytest.raises(RequestError, match="ignore cache_salt") as refused:
        check_forwarded(b'{"model": "m", "cache_salt": "tenant", "tools": []}')
    assert refused.value.param == "cache_salt"
