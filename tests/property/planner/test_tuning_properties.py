"""What tuning never does, whatever searches find and requests say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.test_tuning import FLEET, OPTIONS

from commutator.contract.planner import PlannerTargets
from commutator.contract.tuning import ArmCounts, Trial, trial_outcome
from commutator_tuning.config import TrialsConfig
from commutator_tuning.tuner import (
    Finding,
    Tried,
    Tuner,
    TuningSeen,
    TuningState,
    TuningStep,
    TuningStepKind,
)

CONFIG = TrialsConfig(mode="act")
TARGETS = PlannerTargets(ttft_s=1.0, itl_s=1.0)

values = st.one_of(st.floats(0, 10_000), st.sampled_from([16.0, 100.0, 400.0, 4096.0]))
tried = st.builds(
    Tried,
    option=st.sampled_from(["a", "b", "router.busy.max_queue_s", "disaggregation.timeout_s"]),
    value=values,
    gain=st.floats(-1, 1),
)
counts = st.builds(
    lambda ended, part, delay: ArmCounts(
        ended=ended,
        missed=round(ended * part),
        delay=ended * delay,
        delay_squared=ended * delay * delay * 1.2,
    ),
    st.integers(0, 300),
    st.floats(0, 1),
    st.floats(0, 4),
)
seen = st.fixed_dictionaries(
    {
        "arms": st.none() | st.tuples(counts, counts),
        "fleet": st.sampled_from([FLEET] * 9 + [{"both ready": 3}]),
        "steady": st.booleans(),
        "finding": st.none() | st.builds(Finding, tried=st.lists(tried, max_size=4)),
    }
)


@define
class Watched:
    """A tuner whose promises are checked at each step."""

    tuner: Tuner
    state: TuningState = field(factory=TuningState)
    now_s: float = 0.0
    ended_s: float | None = None
    """When the last trial ended."""

    def step(self, seconds: float, **what: Any) -> TuningStep:
        self.now_s += seconds
        before = self.state
        self.state, step = self.tuner.step(before, TuningSeen(**what), self.now_s)
        for option, value in self.tuner.values(self.state).items():
            assert OPTIONS[option].accepts(value) or value == OPTIONS[option].value
        assert set(self.state.values) <= set(OPTIONS)
        was, now = before.trial, self.state.trial
        if now is not None:
            assert OPTIONS[now.option].accepts(now.value)
            assert self.tuner.values(self.state)[now.option] == now.before
            if was is not None and now != was:
                assert (now.option, now.before, now.value) == (was.option, was.before, was.value)
        if step.kind is not TuningStepKind.SETTLED:
            assert self.state.values == before.values, "only what settles changes a value"
        elif was is not None:
            changed = self.tuner.values(before).items() ^ self.tuner.values(self.state).items()
            assert {option for option, _ in changed} <= {was.option}, "one option at a time"
        if was is not None and now is None:
            self.ended_s = self.now_s
        if was is None and now is not None and self.ended_s is not None:
            assert self.now_s - self.ended_s >= CONFIG.pause_s
        return step


@given(st.lists(st.tuples(st.sampled_from([1.0, 60.0, 300.0, 1800.0]), seen), max_size=60))
def test_it_stays_in_declared_ranges_with_one_option_at_a_time_and_pauses(
    steps: list[tuple[float, dict[str, Any]]],
) -> None:
    watched = Watched(Tuner(CONFIG, OPTIONS))
    for seconds, what in steps:
        watched.step(seconds, **what)


def on_trial(value: float) -> tuple[Watched, Trial]:
    watched = Watched(Tuner(CONFIG, OPTIONS))
    for seconds in (0.0, CONFIG.pause_s):
        watched.step(seconds, fleet=FLEET)
    found = Finding(tried=[Tried(option="a", value=value, gain=0.5)])
    watched.step(1.0, fleet=FLEET, finding=found)
    trial = watched.state.trial
    assert trial is not None
    return watched, trial


def requests(rng: random.Random, number: int, ttft_s: float) -> ArmCounts:
    made = ArmCounts()
    for _ in range(number):
        made += trial_outcome(TARGETS, rng.expovariate(1 / ttft_s), 0.1)
    return made


@given(
    st.integers(0, 10_000),
    st.sampled_from([16.0, 400.0, 4096.0]),
    st.floats(0.1, 2.0),
    st.floats(2.0, 8.0),
    st.integers(1, 20),
)
def test_a_harmful_value_is_always_rolled_back_within_its_guard(
    seed: int, value: float, ttft_s: float, worse: float, rate: int
) -> None:
    """It doubles the time to the first token, or worse: no more than a tenth ever has it."""
    rng = random.Random(seed)
    watched, trial = on_trial(value)
    before = watched.tuner.values(watched.state)
    began_s = watched.now_s
    while watched.state.trial is not None:
        assert watched.state.trial == trial, "it was promoted"
        several = rate * 5
        both = requests(rng, several * 9, ttft_s), requests(rng, several, ttft_s * worse)
        watched.step(60.0, fleet=FLEET, arms=both)
    assert watched.now_s - began_s <= 6 * CONFIG.canary_s
    assert watched.tuner.values(watched.state) == before


@given(st.integers(0, 300), st.floats(0.0, 4.0), st.booleans())
def test_where_no_request_is_better_off_nothing_changes(
    number: int, delay: float, missed: bool
) -> None:
    watched, trial = on_trial(400.0)
    all_alike = ArmCounts(
        ended=number, missed=number * missed, delay=number * delay, delay_squared=number * delay**2
    )
    for _ in range(300):
        now = watched.state.trial
        if now is None:
            break
        nothing = ArmCounts()
        both = {0.0: (all_alike, nothing), 1.0: (nothing, all_alike)}
        watched.step(60.0, fleet=FLEET, arms=both.get(now.share, (all_alike, all_alike)))
    assert watched.state.trial is None
    assert watched.tuner.values(watched.state)["a"] == trial.before


# ------------------------------------------------- requests that share workers


_SHAPE = 4
Load = Callable[[float], float]
"""What delays are multiplied with at a time, from 0 to 1 through the trial."""


@define
class World:
    """Requests that share workers: a value for some of them changes the delays of all alike."""

    load: Load
    effect: float = 1.0
    """What delays are multiplied with where all requests have the value."""
    requests_per_s: float = 4.0

    def arms(self, rng: random.Random, share: float, place: float) -> tuple[ArmCounts, ArmCounts]:
        """The requests of 25 seconds."""
        mean = 0.4 * self.load(place) * (1 + (self.effect - 1) * share)
        number = round(25 * self.requests_per_s)
        having = round(number * share)
        return self._requests(rng, number - having, mean), self._requests(rng, having, mean)

    def _requests(self, rng: random.Random, number: int, mean: float) -> ArmCounts:
        """Their delays have a gamma distribution, and miss a target above 1."""
        if not number:
            return ArmCounts()
        delay = rng.gammavariate(_SHAPE * number, mean / _SHAPE)
        x = _SHAPE / mean
        misses = math.exp(-x) * sum(x**k / math.factorial(k) for k in range(_SHAPE))
        return ArmCounts(
            ended=number,
            missed=sum(rng.random() < misses for _ in range(number)),
            delay=delay,
            delay_squared=delay * delay / number * (1 + 1 / _SHAPE),
        )


@frozen
class Course:
    """What became of a trial in a world."""

    end: TuningStepKind
    all_had_it_s: float
    """How long all requests had the value, in the one period with the most."""


def course(world: World, seed: int, begun_trials: int = 0) -> Course:
    rng = random.Random(seed)
    watched = Watched(Tuner(CONFIG, OPTIONS), TuningState(stages=begun_trials))
    for seconds in (0.0, CONFIG.pause_s - 600.0, *[25.0] * 24):
        watched.step(seconds, fleet=FLEET, arms=world.arms(rng, 0.0, 0.0))
    found = Finding(tried=[Tried(option="a", value=400.0, gain=0.5)])
    assert watched.step(0.0, fleet=FLEET, finding=found).kind is TuningStepKind.TRIED
    began_s, all_had_it_s = watched.now_s, 0.0
    while True:
        trial, since_s = watched.state.trial, watched.state.since_s
        assert trial is not None
        place = (watched.now_s - began_s) / (7 * CONFIG.canary_s)
        step = watched.step(25.0, fleet=FLEET, arms=world.arms(rng, trial.share, place))
        if trial.share > 1 / 2:
            all_had_it_s = max(all_had_it_s, watched.now_s - since_s)
        if watched.state.trial is None:
            assert step.kind is not None
            return Course(step.kind, all_had_it_s)


def steady(_: float) -> float:
    return 1.0


def falls(place: float) -> float:
    return 1.0 - 0.7 * place


def falls_at_once(place: float) -> float:
    return 1.0 if place < 0.15 else 0.5


def rises(place: float) -> float:
    return 1.0 + 0.15 * place


def swings(place: float) -> float:
    """About once in two periods, which a fixed order of them would take for an effect."""
    return 1.0 + 0.15 * math.cos(place * math.pi * 12)


@pytest.mark.parametrize("load", [steady, falls, falls_at_once, rises, swings])
def test_load_alone_settles_a_value_no_more_often_than_stated(load: Load) -> None:
    """At most 3 of 64 trials; of 150, chance settles 16 with a probability of 0.2 %."""
    courses = [course(World(load), seed, begun_trials=100 * seed) for seed in range(150)]
    settled = sum(one.end is TuningStepKind.SETTLED for one in courses)
    through = sum(one.all_had_it_s >= CONFIG.canary_s / 2 for one in courses)
    print(f"{load.__name__}: {settled} of {len(courses)} settled, {through} had whole periods")
    assert settled < 16
    assert through > 75, "a test of trials that end at once would show nothing"


@pytest.mark.parametrize("load", [steady, falls, falls_at_once, swings])
@pytest.mark.parametrize("effect", [0.5, 0.7])
def test_a_gain_that_all_requests_share_is_found(load: Load, effect: float) -> None:
    """Those with the value and the others fare alike, so comparing the two shows nothing."""
    ends = [course(World(load, effect), seed, 100 * seed).end for seed in range(40)]
    assert ends.count(TuningStepKind.SETTLED) >= 32, "the guard of a canary ends some by chance"


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([steady, falls, rises, swings]), st.floats(1.6, 4.0))
def test_a_harm_that_all_requests_share_is_rolled_back_within_its_guard(
    seed: int, load: Load, effect: float
) -> None:
    """No more than one period of all requests ever has the value."""
    ended = course(World(load, effect), seed, 100 * seed)
    assert ended.end is TuningStepKind.ROLLED_BACK
    assert ended.all_had_it_s <= CONFIG.canary_s / 2
