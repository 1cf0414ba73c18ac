"""When the policies prefill elsewhere, and what each of their options does."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from commutator.contract.disagg import DisaggQuestion, MeasuredSpeeds
from commutator.contract.routing import WorkerLoad
from commutator_disagg import Always, Conditional, ConditionalConfig, Cost, CostConfig

QUESTION = DisaggQuestion(
    prompt_tokens=3000,
    cached_tokens=0,
    decode_load=WorkerLoad(),
    prefill_loads={"p-0": WorkerLoad(), "p-1": WorkerLoad()},
    prefill_cached_tokens=0,
    queued_prefills=0,
    queue_age_s=0.0,
    token_bytes=1000,
)


def by_length(**options: Any) -> Conditional:
    return Conditional(ConditionalConfig(kind="conditional", **options))


@pytest.mark.parametrize(
    ("prompt", "cached", "separate", "reason"),
    [
        (1000, 0, False, "short prompt"),
        (1001, 0, True, "long prompt"),
        (3000, 2000, False, "mostly cached"),
        (3000, 1999, True, "long prompt"),
    ],
)
def test_the_uncached_length_decides(prompt: int, cached: int, separate: bool, reason: str) -> None:
    question = evolve(QUESTION, prompt_tokens=prompt, cached_tokens=cached)
    answer = by_length(max_local_prefill_length=1000).decide(question)
    assert (answer.separate, answer.reason) == (separate, reason)
    assert answer.terms["uncached_tokens"] == prompt - cached


def test_a_long_queue_is_not_joined() -> None:
    policy = by_length(max_prefill_queue_size=3)
    assert policy.decide(evolve(QUESTION, queued_prefills=2)).separate
    answer = policy.decide(evolve(QUESTION, queued_prefills=3))
    assert (answer.separate, answer.reason) == (False, "queue full")


def test_the_ratio_sends_short_prompts_away_unless_they_are_cached() -> None:
    """Dynamo's present rule: local if fewer than 2048 tokens and less than 0.7 of the prompt."""
    policy = by_length(max_local_prefill_length=2047, max_local_uncached_ratio=0.7)
    for prompt, cached, separate in [
        (100, 0, True),
        (100, 30, True),
        (100, 31, False),
        (4000, 1953, False),
        (4000, 1952, True),
    ]:
        question = evolve(QUESTION, prompt_tokens=prompt, cached_tokens=cached)
        assert policy.decide(question).separate is separate, (prompt, cached)


def test_always_needs_something_to_prefill() -> None:
    always = Always()
    assert always.decide(QUESTION).separate
    assert not always.decide(evolve(QUESTION, cached_tokens=3000)).separate


def by_cost(**options: Any) -> Cost:
    return Cost(CostConfig(kind="cost", **options))


def test_between_idle_workers_the_hand_over_is_not_worth_it() -> None:
    answer = by_cost(delay_weight=0.0).decide(QUESTION)
    assert not answer.separate
    assert answer.terms["local_s"] == pytest.approx(3000 / 8000)
    assert answer.terms["separate_s"] == pytest.approx(3000 / 8000 + 0.005 + 3000 * 1000 / 1e9)


def test_prompts_before_it_and_answers_beside_it_speak_for_elsewhere() -> None:
    behind = evolve(
        QUESTION,
        decode_load=WorkerLoad(
            active_requests=1, active_prefill_tokens=4000, active_decode_blocks=250
        ),
    )
    assert by_cost(delay_weight=0.0).decide(behind).separate
    beside = evolve(
        QUESTION,
        decode_load=WorkerLoad(
            active_requests=8, active_prefill_tokens=0, active_decode_blocks=800
        ),
    )
    assert not by_cost(delay_weight=0.0).decide(beside).separate
    assert by_cost(delay_weight=0.1).decide(beside).separate
    assert not by_cost(delay_weight=0.1, min_gain_s=1.0).decide(beside).separate


def test_the_idlest_prefill_worker_and_the_queue_count() -> None:
    policy, beside = (
        by_cost(),
        evolve(
            QUESTION,
            decode_load=WorkerLoad(
                active_requests=8, active_prefill_tokens=0, active_decode_blocks=800
            ),
        ),
    )
    busy = {
        "p-0": WorkerLoad(active_requests=1, active_prefill_tokens=8000, active_decode_blocks=500),
        "p-1": WorkerLoad(active_requests=1, active_prefill_tokens=6000, active_decode_blocks=400),
    }
    assert policy.separate_s(evolve(beside, prefill_loads=busy)) == pytest.approx(
        policy.separate_s(beside) + 6000 / 8000
    )
    queued = evolve(beside, queued_prefills=4)
    assert policy.separate_s(queued) == pytest.approx(policy.separate_s(beside) + 2 * 3000 / 8000)


def test_what_was_measured_replaces_what_was_assumed() -> None:
    measured = MeasuredSpeeds(
        prefill_tokens_per_s=1000.0,
        local_prefill_tokens_per_s=500.0,
        handover_bytes_per_s=1e6,
        handover_latency_s=0.25,
    )
    policy, question = by_cost(delay_weight=0.0), evolve(QUESTION, speeds=measured)
    assert policy.local_s(question) == pytest.approx(6.0)
    assert policy.separate_s(question) == pytest.approx(3.0 + 0.25 + 3.0)
    slow = by_cost(
        prefill_tokens_per_s=1000.0,
        local_prefill_tokens_per_s=500.0,
        handover_bytes_per_s=1e6,
        handover_latency_s=0.25,
        delay_weight=0.0,
    )
    assert slow.local_s(QUESTION) == pytest.approx(6.0)
    assert slow.separate_s(QUESTION) == pytest.approx(3.0 + 0.25 + 3.0)
