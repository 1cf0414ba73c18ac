"""The formulas of the planner `slo`, by worked examples with a `sim` worker of default options."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.planned_fleet import SIM

from commutator.contract.planner import PlannerTargets, length_bucket
from commutator.contract.worker import Role
from commutator_slo.need import Demand, Situation, need, needs
from commutator_slo.queueing import (
    decode_rate,
    mean_wait_s,
    running_requests,
    step_time_s,
)

PROMPT_S = 3000 / SIM.prefill_tokens_per_s


def demand(rate: float, prompt_tokens: int, output_tokens: float = 0.0, **more: Any) -> Demand:
    values: dict[str, Any] = {
        "requests_per_s": rate,
        "context_tokens": float(prompt_tokens),
        "output_tokens": output_tokens,
        "gap_variation": 1.0,
        "growth": 1.0,
        "backlog_tokens": 0,
    }
    return Demand(prompt_lengths={length_bucket(prompt_tokens): 1.0}, **(values | more))


@pytest.mark.parametrize(("rate", "ttft_s"), [(1, 0.4875), (2, 0.9375), (2.5, 3.1875)])
def test_one_worker_is_an_m_d_1_queue(rate: float, ttft_s: float) -> None:
    """Vector V4."""
    wait_s = mean_wait_s(1, rate * PROMPT_S, PROMPT_S, arrival_cv2=1, service_cv2=0)
    assert PROMPT_S + wait_s == pytest.approx(ttft_s)


def test_regular_arrivals_wait_less() -> None:
    """Vector V5: Kingman's factor."""
    poisson, regular = (
        mean_wait_s(1, 0.9, 1.0, arrival_cv2=cv2, service_cv2=0.22) for cv2 in (1, 0.18)
    )
    assert [poisson, regular] == pytest.approx([5.5, 1.81], abs=0.02)


def test_a_decode_worker_runs_as_many_as_its_steps_allow() -> None:
    """Vector V6."""
    rate = decode_rate(SIM, 0, 150, 0.05)
    running = running_requests(SIM, rate, 0, 150)
    assert math.floor(running) == 125
    assert step_time_s(SIM, 0, 150, 125) == pytest.approx(0.04975)
    assert rate == pytest.approx(16.75, rel=0.001)


def test_kv_memory_and_the_batch_cap_what_runs() -> None:
    """Vector V6."""
    # 262,144 tokens hold 38.5 requests of 6,650 prompt tokens, computed elsewhere, and 150 more.
    capped = decode_rate(SIM, 0, 150, 0.05, context_tokens=6650)
    running = 262_144 / (6650 + 75)
    assert capped == pytest.approx(running / (150 * (0.006 + 0.00035 * running)))
    assert capped < decode_rate(SIM, 0, 150, 0.05)


@pytest.mark.parametrize(
    ("prompt", "answer", "rate"), [(3000, 150, 2.058), (1500, 150, 3.667), (1155, 211, 4.033)]
)
def test_an_aggregated_worker_shares_its_steps(prompt: int, answer: int, rate: float) -> None:
    """Vector V7."""
    assert decode_rate(SIM, prompt, answer, 0.05) == pytest.approx(rate, abs=0.001)


@pytest.mark.parametrize(("rate", "step_s"), [(1, 0.01048), (2, 0.04138)])
def test_steps_of_an_aggregated_worker_grow_with_its_load(rate: float, step_s: float) -> None:
    """Vector V7."""
    running = running_requests(SIM, rate, 3000, 150)
    assert running == pytest.approx(rate * 150 * step_s, rel=0.001)
    assert step_time_s(SIM, 3000, 150, running) == pytest.approx(step_s, rel=0.001)


def test_the_best_split_of_eight_workers() -> None:
    """Vector V8."""
    prefill, decode = 0.7 * 8000 / 1155, decode_rate(SIM, 0, 211, 0.05)
    assert [prefill, decode] == pytest.approx([4.848, 11.91], abs=0.01)
    rates = [min(p * prefill, (8 - p) * decode) for p in range(1, 8)]
    expected = [4.85, 9.70, 14.55, 19.39, 24.24, 23.82, 11.91]
    assert rates == pytest.approx(expected, abs=0.02)


def test_without_traffic_a_prompt_that_is_too_long_needs_a_warning_and_no_worker() -> None:
    """Vector V9."""
    situation = Situation(
        targets=PlannerTargets(ttft_s=0.5),
        lead_s=120.0,
        demands={Role.PREFILL: demand(0, 9000)},
        performance={Role.PREFILL: SIM},
        supply={Role.PREFILL: 7},
    )
    proposal = needs(situation)[Role.PREFILL]
    assert proposal.workers == 0
    assert proposal.warning is not None
    assert "over 4,000 tokens" in proposal.warning


def test_a_backlog_needs_workers_that_clear_it() -> None:
    targets = PlannerTargets(ttft_s=0.5)
    calm = need(Role.BOTH, demand(1, 1000, 100), SIM, targets, 120)
    late = demand(1, 1000, 100, backlog_tokens=8000 * 450)
    assert need(Role.BOTH, late, SIM, targets, 120) == calm + 3


def test_headroom_sizes_for_more() -> None:
    situation = Situation(
        targets=PlannerTargets(),
        lead_s=120.0,
        demands={Role.BOTH: demand(50, 1000, 100)},
        performance={Role.BOTH: SIM},
        supply={Role.BOTH: 1},
    )
    plain, more = (needs(situation, headroom)[Role.BOTH].workers for headroom in (0.0, 0.5))
    assert 1.3 * plain < more < 1.7 * plain
