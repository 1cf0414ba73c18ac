"""Choosing tokens: penalties, filters, seeds, probabilities, each against its definition."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator_reference.sampler import (
    Sampled,
    adjust,
    keep_likeliest,
    keep_top_p,
    sample,
    uniform,
)
from commutator_reference.scheduler import Sequence

EOS = (2,)


def sequence(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    seed: int = 0,
) -> Sequence:
    made = Sequence.start(
        0, GenerateRequest(request_id="r", token_ids=prompt, sampling=params), arrival=0, seed=seed
    )
    made.tokens += output
    return made


def one(logits: list[float], seq: Sequence) -> Sampled:
    (sampled,) = sample(torch.tensor([logits]), [seq], EOS)
    return sampled


def tokens_of(logits: list[float], params: SamplingParams, count: int = 2000) -> Counter[int]:
    row = torch.tensor([logits])
    return Counter(
        sample(row, [sequence(params, seed=seed)], EOS)[0].token_id for seed in range(count)
    )


def test_temperature_zero_takes_the_likeliest() -> None:
    greedy = sequence(SamplingParams(temperature=0.0))
    assert one([0.0, 3.0, 1.0], greedy) == Sampled(1)


def test_frequencies_follow_the_softmax_at_a_temperature() -> None:
    logits, temperature, count = [0.0, 1.0, 2.0], 0.7, 4000
    counts = tokens_of(logits, SamplingParams(temperature=temperature), count)
    wanted = torch.softmax(torch.tensor(logits) / temperature, dim=-1)
    for token in range(3):
        share = float(wanted[token])
        assert counts[token] / count == pytest.approx(share, abs=4 * math.sqrt(share / count))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_p": 0.5}, {4}),
        ({"top_p": 0.7}, {3, 4}),
        ({"min_p": 0.2}, {3, 4}),
        ({"min_p": 1.0}, {4}),
        ({"top_k": 3, "top_p": 0.9}, {3, 4}),
        ({"logit_bias": {0: 100.0}}, {0}),
        ({"logit_bias": {4: -100.0, 3: -100.0, 2: -100.0, 1: -100.0}}, {0}),
        ({"min_tokens": 1, "max_tokens": 2, "stop_token_ids": (4, 3)}, {0, 1}),
    ],
)
def test_filters_leave_only_what_they_allow(params: dict[str, Any], allowed: set[int]) -> None:
    # Probabilities 0.03, 0.09, 0.06 (the end of the sequence), 0.24, 0.58.
    logits = [math.log(p) for p in (0.03, 0.09, 0.06, 0.24, 0.58)]
    assert set(tokens_of(logits, SamplingParams(**params), 400)) == allowed


def test_top_p_over_more_tokens_than_are_tried_first() -> None:
    flat = torch.full((5000,), 1 / 5000)
    kept = keep_top_p(flat, 0.5)
    assert int((kept > 0).sum()) in {2500, 2501}


def test_top_p_counts_what_the_other_filters_left() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    kept = keep_likeliest(probabilities, SamplingParams(top_k=2, top_p=0.6))
    # 0.4 is 57 % of the 0.7 that top_k left, so the second is needed too.
    assert kept.tolist() == pytest.approx([0.4, 0.3, 0.0, 0.0])


def test_penalties_follow_vllm() -> None:
    logits = torch.tensor([2.0, 2.0, -2.0, 2.0])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 2.0}
    )
    # Token 0 stands in the prompt, 1 twice in the output, 2 once in each, 3 nowhere.
    adjusted = adjust(logits, params, [0, 2, 1, 1, 2], 2, set())
    assert adjusted.tolist() == pytest.approx([1.0, 0.0, -4.75, 4.0])
    assert logits.tolist() == [2.0, 2.0, -2.0, 2.0], "the raw logits are needed for logprobs"


def test_min_tokens_hold_back_what_would_stop() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(1,), temperature=0.0)
    logits = [0.0, 9.0, 9.0, 1.0]
    assert one(logits, sequence(params, output=(0,))).token_id == 3
    assert one(logits, sequence(params, output=(0, 0))).token_id == 1


def test_ignored_ends_are_not_held_back() -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True, temperature=0.0)
    assert one([0.0, 1.0, 9.0], sequence(params)).token_id == 2


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = [1.0, 2.0, 0.5, -1.0]
    params = SamplingParams(temperature=0.0, top_logprobs=2, logit_bias={3: 50.0})
    sampled = one(logits, sequence(params))
    wanted = torch.log_softmax(torch.tensor(logits), dim=-1).tolist()
    assert sampled.token_id == 3
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == 3
    assert sampled.logprob.logprob == pytest.approx(wanted[3])
    assert [token for token, _ in sampled.logprob.top] == [1, 0]
    assert [value for _, value in sampled.logprob.top] == pytest.approx([wanted[1], wanted[0]])


def test_no_alternatives_are_listed_when_none_are_asked_for() -> None:
    sampled = one([1.0, 2.0], sequence(SamplingParams(top_logprobs=0)))
    assert sampled.logprob is not None
    assert sampled.logprob.top == ()


def test_a_seeded_row_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator)
    params = SamplingParams(temperature=1.3, top_p=0.9)
    rows = [sequence(params, output=(1,) * index, seed=index) for index in range(6)]
    together = sample(logits, rows, EOS)
    apart = [sample(logits[i : i + 1], [row], EOS)[0] for i, row in enumerate(rows)]
    assert together == apart


def test_seed_and_position_decide() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    drawn = {uniform(seed, position) for seed in (-1, 0, 1, 2**80) for position in range(250)}
    assert len(drawn) == 1000
    assert 0 <= min(drawn) < 0.01
    assert 0.99 < max(drawn) < 1
    assert sum(drawn) / 1000 == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        one([0.0, bad], sequence(SamplingParams()))
