"""An answer that another worker began continues as if it had not been interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from tests.support.reference_options import sized
from tests.support.tiny_llama import tiny_model

from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import RequestError
from commutator_reference.engine import ReferenceEngine

MODEL = tiny_model()
PROMPT = [(5 * i * i + 7) % 90 + 5 for i in range(21)]


def letters(ids: Any) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)


def run(*requests: GenerateRequest) -> list[list[TokenDelta]]:
    """The deltas of each, all computed together."""
    options = sized(num_blocks=512, block_size=4)
    engine = ReferenceEngine(MODEL, *options, decode=letters)
    for key, request in enumerate(requests):
        engine.submit(key, request)
    deltas: dict[int, list[TokenDelta]] = {key: [] for key in range(len(requests))}
    while engine.load().running + engine.load().waiting:
        for key, delta in engine.step():
            deltas[key].append(delta)
    return list(deltas.values())


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def from_everywhere(request: GenerateRequest, ids: list[int]) -> list[list[TokenDelta]]:
    """The continuations after 1, 2, ... tokens of ``ids``."""
    return run(
        *(
            evolve(request, token_ids=[*PROMPT, *ids[:count]], generated_prefix=count)
            for count in range(1, len(ids))
        )
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 11},
        {"temperature": 1.3, "seed": -5, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.4, "frequency_penalty": -0.5},
        {"temperature": 1.5, "seed": 4, "top_logprobs": 3, "logit_bias": {9: 2.0}},
        {"temperature": 1.5, "seed": 9, "stop_token_ids": tuple(range(0, 97, 9)), "min_tokens": 9},
        {"temperature": 1.5, "seed": 9, "ignore_eos": False, "min_tokens": 17},
    ],
    ids=",".join,
)
def test_every_place_is_good_to_go_on_from(sampling: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
    request = GenerateRequest(request_id="r", token_ids=PROMPT, sampling=params)
    whole = run(request)[0]
    ids = tokens(whole)
    assert len(ids) >= max(2, params.min_tokens)
    for count, rest in enumerate(from_everywhere(request, ids), start=1):
        assert tokens(rest) == ids[count:]
        assert rest[-1].finish_reason is whole[-1].finish_reason
        assert rest[-1].stop_reason == whole[-1].stop_reason
        for new, old in zip(rest, whole[count:], strict=True):
            for a, b in zip(new.logprobs, old.logprobs, strict=True):
                assert a.token_id == b.token_id
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_stop_string_may_have_begun_at_the_other_worker() -> None:
    request = GenerateRequest(
        request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_tokens=24, temperature=0.0)
    )
    stop = letters(tokens(run(request)[0]))[6:10]
    stopping = evolve(request, sampling=evolve(request.sampling, stop=(stop,), ignore_eos=True))
    whole = run(stopping)[0]
    assert whole[-1].stop_reason == stop
    for count, rest in enumerate(from_everywhere(stopping, tokens(whole)), start=1):
        assert tokens(rest) == tokens(whole)[count:]
        assert rest[-1].stop_reason == stop


@pytest.mark.parametrize("done", [-1, 4, 21])
def test_a_prefix_that_cannot_be_is_refused(done: int) -> None:
    request = GenerateRequest(
        request_id="r",
        token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=4),
        generated_prefix=done,
    )
    with pytest.raises(RequestError, match="generated_prefix") as refused:
        run(request)
    assert refused.value.param == "generated_prefix"
