"""A worker's speed, learned from when its requests begin, answer first, and end."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from attrs import evolve
from tests.support.planned_fleet import SIM
from tests.support.sim_config import sim_config

from commutator.contract.planner import (
    Arrivals,
    EnginePerformance,
    Observation,
    PlannedWorker,
    SampleSums,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator.planning import FleetPlanner
from commutator_replay.virtual import PrefillDone, RequestDone, VirtualRequest
from commutator_sim.virtual import SimVirtualEngine
from commutator_slo.config import SloConfig
from commutator_slo.learned import LearnedSpeed, StepMeter, bucket_of
from commutator_slo.need import Need, Situation
from commutator_slo.performance import Sample, sums_of
from commutator_slo.pipeline import Pipeline

TRUE = sim_config().performance()
WRONG = evolve(SIM, prefill_tokens_per_s=2500.0, step_s=0.02, step_request_s=0.002)


def served(
    rate_per_s: float, seconds: float, prompts: int, seed: int = 1, doors: int = 1
) -> list[Mapping[int, SampleSums]]:
    """What each front door measures of a simulated worker with Poisson traffic of all of them."""
    chance, engine, time_s = random.Random(seed), SimVirtualEngine(sim_config()), 0.0
    flying: dict[int, tuple[int, int]] = {}

    def others(door: int, _worker: str) -> int:
        return sum(one != door for one, _ in flying.values())

    meters = [StepMeter(partial(others, door)) for door in range(doors)]

    def until(now_ns: int | None) -> None:
        for event in engine.advance(now_ns):
            if isinstance(event, PrefillDone):
                meters[flying[event.key][0]].answered(event.key, "w", event.time_ns / 1e9)
            elif isinstance(event, RequestDone):
                door, tokens = flying.pop(event.key)
                meters[door].ended(event.key, "w", tokens, event.time_ns / 1e9)

    for key in range(round(rate_per_s * seconds)):
        time_s += chance.expovariate(rate_per_s)
        until(round(time_s * 1e9))
        tokens, prompt = chance.randrange(60, 240), chance.randrange(prompts // 2, 2 * prompts)
        door = chance.randrange(doors)
        engine.submit(key, VirtualRequest(prompt, tokens, [key]))
        flying[key] = door, tokens
        meters[door].began(key, "w", time_s, prompt_tokens=prompt, ahead_tokens=0)
    until(None)
    return [meter.take() for meter in meters]


def learned(*measured: Mapping[int, SampleSums], told: EnginePerformance = WRONG) -> LearnedSpeed:
    speed = LearnedSpeed(told=told)
    for number, one in enumerate(measured):
        speed = speed.learn(one, 61.0 * number, 61.0)
    return speed


def assert_close(found: EnginePerformance, rel: float) -> None:
    """What requests cost and how long steps take: what plans use."""
    for prompt, answer in ((100, 300), (1000, 150), (4000, 50)):
        assert found.work_s(prompt, answer) == pytest.approx(TRUE.work_s(prompt, answer), rel=rel)
    for requests in (1, 16):
        step_s = found.step_s + requests * found.step_request_s
        assert step_s == pytest.approx(TRUE.step_s + requests * TRUE.step_request_s, rel=rel)


@pytest.mark.parametrize("told", [WRONG, evolve(SIM, prefill_tokens_per_s=30_000.0, step_s=0.001)])
def test_traffic_corrects_what_was_told(told: EnginePerformance) -> None:
    measured = [served(rate, 200, 700, seed)[0] for seed, rate in enumerate((0.5, 2, 5))]
    speed = learned(*measured, told=told)
    assert_close(speed.performance, 0.12)
    assert speed.residual is not None
    assert speed.residual < 0.05
    assert speed.samples > 100


def test_two_front_doors_learn_what_one_would() -> None:
    """Neither sees the other's prompts; together they are right within a tenth."""
    measured = [m for seed, r in enumerate((0.5, 2, 5)) for m in served(r, 200, 700, seed, doors=2)]
    assert_close(learned(*measured).performance, 0.12)


def test_what_is_right_is_left_as_it_is() -> None:
    speed = learned(served(3, 200, 700)[0], told=TRUE)
    assert speed.performance == TRUE
    assert speed.residual is not None
    assert speed.residual < 0.05


def test_too_few_samples_change_nothing() -> None:
    speed = learned({0: sums_of(Sample(seconds=5.0, steps=10, step_requests=10)).times(20)})
    assert speed.performance == WRONG
    assert speed.residual is None
    assert speed.samples == 20


def steps(requests: float, seconds: float) -> dict[int, SampleSums]:
    """100 answers of 100 steps each, with as many requests in a step."""
    sample = Sample(seconds=seconds, steps=100, step_requests=100 * requests)
    return {bucket_of(sample): sums_of(sample).times(100)}


def test_hours_of_steady_load_leave_what_was_learned_at_the_edges() -> None:
    lone, crowd = steps(1, 1.0), steps(64, 7.3)
    speed = learned(lone, crowd, *[steps(8, 1.7)] * 600)
    found = speed.performance
    assert found.step_s + found.step_request_s == pytest.approx(0.010, rel=0.02)
    assert found.step_s + 64 * found.step_request_s == pytest.approx(0.073, rel=0.02)


def test_a_worker_that_becomes_slower_is_believed() -> None:
    speed = learned(*[steps(n, 0.9 + 0.1 * n) for n in (1, 8)])
    for number in range(20):
        slower = {
            bucket: sums for n in (1, 8) for bucket, sums in steps(n, 2 * (0.9 + 0.1 * n)).items()
        }
        speed = speed.learn(slower, 1000.0 + 61 * number, 61.0)
    found = speed.performance
    assert found.step_s + found.step_request_s == pytest.approx(0.020, rel=0.05)


def test_what_is_not_seen_again_is_forgotten_in_days() -> None:
    speed = learned(steps(1, 1.0), *[steps(8, 1.7)] * 10)
    after = speed.learn({}, 1e6, 4 * 86_400.0)
    assert after.samples < 0.05 * speed.samples


def test_a_request_that_moves_or_fails_tells_nothing() -> None:
    meter = StepMeter()
    meter.began("moves", "a", 0.0, prompt_tokens=10, ahead_tokens=0)
    meter.answered("moves", "b", 1.0)
    meter.ended("moves", "b", 50, 2.0)
    meter.began("fails", "a", 0.0, prompt_tokens=10, ahead_tokens=0)
    meter.lost("fails", 3.0)
    meter.ended("fails", "a", 50, 4.0)
    meter.answered("unknown", "a", 5.0)
    assert meter.take() == {}


# --------------------------------------------------------------------------- in plans


class Fewer:
    """One worker fewer than there are."""

    def __call__(self, situation: Situation) -> Mapping[Role, Need]:
        return {
            role: Need(workers=max(1, supply - 1), reason="test")
            for role, supply in situation.supply.items()
        }


def plans(measured: Mapping[int, SampleSums], told: EnginePerformance, **options: Any) -> Any:
    config = SloConfig(kind="test", hold_s=0.0, start_up_s=5.0, **options)
    pipeline = Pipeline(config, {Role.BOTH: told}, needs=Fewer())
    planner = FleetPlanner(config, [Role.BOTH], pipeline)
    state, made = planner.begin(), []
    workers = [
        PlannedWorker(worker_id=name, role=Role.BOTH, phase=WorkerPhase.READY, age_s=99.0)
        for name in "abc"
    ]
    for tick in range(10):
        seen = Observation(
            time_s=5.0 * tick,
            window_s=5.0 if tick else 0.0,
            arrivals={Role.BOTH: Arrivals()},
            workers=workers,
            measured={Role.BOTH: measured} if tick == 1 else {},
        )
        state, plan = planner.plan(state, seen)
        made.append(plan.roles[Role.BOTH])
    return made


def test_nothing_shrinks_on_a_speed_that_times_contradict() -> None:
    """Times that no speed explains: equal steps that take 1 s here and 3 s there."""
    one = Sample(seconds=1.0, steps=100, step_requests=100)
    contradicting = {
        1: sums_of(one).times(50),
        2: sums_of(evolve(one, seconds=3.0)).times(50),
    }
    last = plans(contradicting, TRUE)[-1]
    assert last.desired == 3
    assert last.residual > 0.3
    assert last.samples == 100
    assert "held at 3: measured times are" in last.reason
    assert plans(steps(1, 1.0), TRUE)[-1].desired == 2


def test_every_plan_says_what_the_speed_rests_on() -> None:
    made = plans(steps(1, 1.0), TRUE)
    assert (made[0].samples, made[0].residual) == (0, None)
    assert made[2].samples == 64, "as many as a bucket holds"
    assert made[2].residual == pytest.approx(0.0, abs=0.05)


def test_learning_can_be_turned_off() -> None:
    last = plans(steps(1, 9.0), TRUE, learn=False)[-1]
    assert (last.samples, last.desired) == (0, 2)


def test_what_was_learned_is_used_again() -> None:
    planner = Pipeline(SloConfig(kind="test"), {Role.BOTH: WRONG}, needs=Fewer())
    before = learned(*[served(rate, 200, 700)[0] for rate in (0.5, 2, 5)])
    again = planner.begin({Role.BOTH: before.buckets}).roles[Role.BOTH].speed
    assert_close(again.performance, 0.12)
    assert planner.begin().roles[Role.BOTH].speed.performance == WRONG
