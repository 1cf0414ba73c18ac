"""The work of a plan grows no faster than the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.support.planned_fleet import SIM, arrivals, planner_of
from tests.support.work import calls_of

from commutator.contract.planner import (
    Arrivals,
    Observation,
    PlannedWorker,
    PlannerBounds,
    SampleSums,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthConfig
from commutator_slo.learned import bucket_of
from commutator_slo.performance import Sample, sums_of


def measured() -> Mapping[int, SampleSums]:
    """In every bucket that traffic reaches."""
    found: dict[int, SampleSums] = {}
    for running in (1, 2, 4, 8, 16, 32, 64):
        for prompt in (0, 30, 300, 3000):
            seconds = 100 * (SIM.step_s + running * SIM.step_request_s) + prompt / 8.0
            one = Sample(
                seconds=seconds, steps=100, step_requests=100 * running, prompt_tokens=100 * prompt
            )
            found[bucket_of(one)] = sums_of(one).times(3)
    return found


def calls_by_tick(workers: int) -> Sequence[int]:
    """Of 60 ticks, from the fewest calls on."""
    bounds = PlannerBounds(both=(1, 2 * workers))
    config = SloConfig(kind="slo", bounds=bounds)
    planner = planner_of(config, growth=Growth(GrowthConfig()))
    state, calls = planner.begin(), list[int]()
    fleet = [
        PlannedWorker(
            worker_id=f"w-{number:04}",
            role=Role.BOTH,
            phase=WorkerPhase.READY if number % 8 else WorkerPhase.STARTING,
            age_s=50.0,
            active_requests=number % 9,
            active_prefill_tokens=number % 9 * 300,
            cached_blocks=number,
        )
        for number in range(workers)
    ]
    samples = measured()
    for tick in range(60):
        lengths = dict.fromkeys((64, 256, 724, 1024, 2048, 4096, 16384), workers)
        arrived: Arrivals = arrivals(10 * workers + tick % 7, 1155, 5.0)
        seen = Observation(
            time_s=5.0 * tick,
            window_s=5.0 if tick else 0.0,
            arrivals={
                Role.BOTH: Arrivals(
                    requests=arrived.requests,
                    prompt_tokens=arrived.prompt_tokens,
                    context_tokens=arrived.context_tokens,
                    prompt_lengths=lengths,
                    gaps_squared_s2=arrived.gaps_squared_s2,
                )
            },
            workers=fleet,
            output_tokens=200.0,
            attained_ttft=0.97,
            attained_itl=0.99,
            measured={Role.BOTH: samples},
        )

        def plan() -> None:
            nonlocal state
            state, _ = planner.plan(state, seen)  # noqa: B023 - at once

        calls.append(calls_of(plan))
    return sorted(calls)


def test_a_plan_asks_little_of_each_worker() -> None:
    few, many = calls_by_tick(64), calls_by_tick(1024)
    print(few[30], few[-1], many[30], many[-1])
    # One plan a minute also makes a fit.
    assert few[30] < 10_000
    assert few[-1] < 200_000
    assert many[30] < 17 * few[30]
    assert many[-1] < 17 * few[-1]
