"""Requests that wait in a replay while every worker is busy, worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sim_config import sim_config

from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    Decision,
    RouteRequest,
    RoutingPolicy,
)
from commutator_balance import LeastLoaded
from commutator_replay.fleet import VirtualWorker
from commutator_replay.replay import Outcome, replay
from commutator_replay.trace import TraceRequest
from commutator_sim.virtual import SimVirtualEngine

PARAMETERS = sim_config(block_size=512, kv_capacity_blocks=100)
ONE = BusyConfig(max_active_requests=1)
PROMPT_S = 0.05
"""A prompt of 400 tokens alone at a worker."""


class Watching(LeastLoaded):
    """Notes the load of each worker that it was offered."""

    def __init__(self) -> None:
        super().__init__()
        self.most_active = 0

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        offered = [one.load.active_requests for one in candidates]
        self.most_active = max(self.most_active, *offered)
        return super().pick(request, candidates, rng)


def run(
    *times_ms: float,
    workers: int = 1,
    busy: BusyConfig = ONE,
    policy: RoutingPolicy | None = None,
) -> Outcome:
    fleet = [
        VirtualWorker.make(f"w-{number}", SimVirtualEngine(PARAMETERS)) for number in range(workers)
    ]
    trace = [TraceRequest(time_ms, 400, 1, (100 + n,)) for n, time_ms in enumerate(times_ms)]
    return replay(trace, fleet, policy or LeastLoaded(), busy=busy)


def ttfts(outcome: Outcome) -> list[float]:
    return [one.ttft_s for one in outcome.finished]


def test_requests_wait_for_a_worker_that_is_not_busy_in_their_order() -> None:
    outcome = run(0, 1, 2)
    assert ttfts(outcome) == pytest.approx([PROMPT_S, 2 * PROMPT_S - 0.001, 3 * PROMPT_S - 0.002])
    assert outcome.refused == 0


def test_whichever_worker_is_free_first_takes_the_next() -> None:
    outcome = run(0, 20, 21, workers=2)
    assert ttfts(outcome) == pytest.approx([PROMPT_S, PROMPT_S, 2 * PROMPT_S - 0.021])
    first, second, third = (one.worker_id for one in outcome.finished)
    assert first == third != second


def test_a_full_queue_refuses() -> None:
    outcome = run(0, 1, 2, 3, busy=BusyConfig(max_active_requests=1, max_queued_requests=1))
    assert len(outcome.finished) == 2
    assert outcome.refused == 2


def test_who_has_waited_too_long_is_refused() -> None:
    outcome = run(0, 1, 2, 200, busy=BusyConfig(max_active_requests=1, max_queue_s=0.06))
    assert ttfts(outcome) == pytest.approx([PROMPT_S, 2 * PROMPT_S - 0.001, PROMPT_S])
    assert outcome.refused == 1


def test_without_thresholds_nothing_waits() -> None:
    outcome = run(0, 1, 2, busy=BusyConfig())
    assert outcome.refused == 0
    together_s = 3 * PROMPT_S  # the later two share the worker's second step
    assert ttfts(outcome) == pytest.approx([PROMPT_S, together_s - 0.001, together_s - 0.002])


@settings(max_examples=30, deadline=None)
@given(
    times_ms=st.lists(st.integers(0, 300), min_size=1, max_size=30).map(sorted),
    workers=st.integers(1, 4),
    most=st.integers(1, 3),
    queued=st.integers(0, 5),
)
def test_nothing_is_lost_and_no_worker_has_more_than_the_threshold(
    times_ms: list[int], workers: int, most: int, queued: int
) -> None:
    busy = BusyConfig(max_active_requests=most, max_queued_requests=queued)
    policy = Watching()
    outcome = run(*times_ms, workers=workers, busy=busy, policy=policy)
    assert len(outcome.finished) + outcome.refused == len(times_ms)
    assert policy.most_active < most
