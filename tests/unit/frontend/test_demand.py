"""What a front door counts for the planner: on arrival, once, whatever became of the request."""

from __future__ import annotations

import asyncio

import pytest
from attrs import define, evolve

from commutator.contract.planner import PlannerTargets, length_bucket
from commutator.contract.request import FinishReason, RequestOutcome, RequestSummary
from commutator.contract.tuning import ArmCounts, Trial
from commutator.contract.worker import Role
from commutator.demand import DoorReport
from commutator.errors import RoutingError
from commutator.frontend.demand import DemandCounter
from commutator_slo.config import SloConfig


@define
class Door:
    now_s: float = 100.0
    counter: DemandCounter = None  # type: ignore[assignment]
    number: int = 0

    def __attrs_post_init__(self) -> None:
        targets = PlannerTargets(ttft_s=0.5, itl_s=0.05)
        self.counter = DemandCounter(
            SloConfig(kind="slo", targets=targets), Role.BOTH, lambda: self.now_s
        )

    def arrives(self, prompt_tokens: int = 100) -> RequestSummary:
        request = RequestSummary(
            request_id="same for all", model="m", prompt_tokens=prompt_tokens, max_tokens=10
        )
        self.counter.request_received(request)
        return request

    def ends(self, request: RequestSummary, tokens: int, duration_s: float) -> None:
        outcome = RequestOutcome(
            worker_id="w",
            finish_reason=FinishReason.STOP,
            generated_tokens=tokens,
            cached_tokens=0,
            duration_s=duration_s,
        )
        self.counter.request_finished(request, outcome)

    def report(self) -> DoorReport:
        self.number += 1
        return self.counter.report("d", self.number)


def test_a_request_counts_with_the_tokens_that_no_cache_is_expected_to_hold() -> None:
    door = Door()
    door.counter.placed(door.arrives(100), "w", uncached_tokens=30)
    counts = door.report().arrived[Role.BOTH]
    assert (counts.requests, counts.prompt_tokens, counts.context_tokens) == (1, 30, 100)
    assert counts.prompt_lengths == {length_bucket(30): 1}


def test_a_request_that_waits_counts_at_once_and_only_once() -> None:
    door = Door()
    door.counter.placed(door.arrives(100), "w", uncached_tokens=50)
    request = door.arrives(400)
    door.now_s += 3.0
    report = door.report()
    assert (report.waiting_requests, report.oldest_wait_s) == (1, 3.0)
    assert report.waiting_tokens == {Role.BOTH: 400}
    counts = report.arrived[Role.BOTH]
    assert (counts.requests, counts.prompt_tokens) == (2, 250), "as much cached as of the others"
    door.counter.placed(request, "w", uncached_tokens=400)
    after = door.report()
    assert after.arrived[Role.BOTH] == counts
    assert (after.waiting_requests, after.oldest_wait_s) == (0, None)


@pytest.mark.parametrize("error", [RoutingError("no worker"), asyncio.CancelledError()])
def test_a_refused_request_is_demand_too(error: BaseException) -> None:
    door = Door()
    request = door.arrives()
    door.counter.request_failed(request, error, None)
    assert door.report().arrived[Role.BOTH].requests == 1
    placed = door.arrives()
    door.counter.placed(placed, "w", uncached_tokens=100)
    door.counter.request_failed(placed, error, "w")
    assert door.report().arrived[Role.BOTH].requests == 2


def test_a_prompt_computed_elsewhere_counts_there() -> None:
    door = Door()
    door.counter.placed(door.arrives(100), "w", uncached_tokens=80, separate=True)
    arrived = door.report().arrived
    assert (arrived[Role.BOTH].requests, arrived[Role.BOTH].prompt_tokens) == (1, 0)
    assert (arrived[Role.PREFILL].requests, arrived[Role.PREFILL].prompt_tokens) == (1, 80)


def test_gaps_are_those_between_arrivals() -> None:
    door = Door()
    for gap_s in (0.0, 1.0, 3.0):
        door.now_s += gap_s
        door.counter.placed(door.arrives(), "w", uncached_tokens=10)
    assert door.report().arrived[Role.BOTH].gaps_squared_s2 == pytest.approx(10.0)


def test_targets_are_counted_where_they_are_met() -> None:
    door = Door()
    for ttft_s, duration_s in ((0.4, 0.4 + 9 * 0.04), (0.6, 0.6 + 9 * 0.06)):
        request = door.arrives()
        door.counter.placed(request, "w", uncached_tokens=10)
        door.counter.request_first_token(request, "w", ttft_s)
        door.ends(request, 10, duration_s)
    report = door.report()
    assert (report.first_tokens, report.first_tokens_in_time) == (2, 1)
    assert (report.answers, report.answers_in_time, report.answer_tokens) == (2, 1, 20)


def test_ended_requests_tell_how_fast_their_worker_is() -> None:
    door = Door()
    request = door.arrives(100)
    door.counter.placed(request, "w", uncached_tokens=80, ahead_tokens=20)
    door.now_s += 0.5
    door.counter.request_first_token(request, "w", 0.5)
    door.now_s += 2.0
    door.ends(request, 21, 2.5)
    (buckets,) = door.report().measured.values()
    first, others = sorted(buckets.values(), key=lambda sums: -sums.terms[3])
    assert first.terms == (0.0, 0.0, 200.0, 2.0), "100 tokens, one first token in half a second"
    assert others.terms == (10.0, 10.0, 0.0, 0.0), "20 steps with one request in two seconds"


def test_requests_of_a_trial_count_by_the_value_that_they_had() -> None:
    door = Door()
    before = door.arrives()
    trial = Trial(number=7, option="a", before=1.0, value=2.0, share=1.0)
    door.counter.use_trial(trial)
    door.ends(before, 10, 0.3)
    assert door.report().trial == 7
    assert door.report().arms == (ArmCounts(), ArmCounts()), "it began before the trial"
    good, gone, broken = door.arrives(), door.arrives(), door.arrives()
    door.counter.request_first_token(good, "w", 0.25)
    door.ends(good, 11, 0.75)
    door.counter.request_failed(gone, asyncio.CancelledError(), "w")
    door.counter.request_failed(broken, RoutingError("no worker"), None)
    arms = door.report().arms
    assert arms[0] == ArmCounts()
    assert (arms[1].ended, arms[1].missed, arms[1].failed) == (2, 1, 1), "not whose client left"
    assert arms[1].delay == pytest.approx((0.5 + 1.0) / 2 + 4.0)
    door.counter.use_trial(trial)
    assert door.report().arms == arms, "told again"
    late = door.arrives()
    door.counter.use_trial(evolve(trial, number=8, share=0.0))
    door.ends(late, 10, 0.3)
    assert door.report().arms == (ArmCounts(), ArmCounts()), "it began in another stage"
    door.ends(door.arrives(), 10, 0.3)
    assert door.report().arms[0].ended == 1
    door.counter.use_trial(None)
    assert (door.report().trial, door.report().arms) == (0, (ArmCounts(), ArmCounts()))
    door.ends(door.arrives(), 10, 0.3)
    assert door.report().arms[0].ended == 1, "to be compared with a later trial"
