"""What tuning never does, whatever searches find and requests say."""

from __future__ import annotations

import random
from typing import Any

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.test_tuning import FLEET, OPTIONS

from commutator.contract.planner import PlannerTargets, TuningConfig
from commutator.planner.tuning import (
    ArmCounts,
    Finding,
    Trial,
    Tried,
    Tuner,
    TuningSeen,
    TuningState,
    TuningStep,
    TuningStepKind,
    trial_outcome,
)

CONFIG = TuningConfig(mode="act")
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
        made = made.plus(trial_outcome(TARGETS, rng.expovariate(1 / ttft_s), 0.1))
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


@given(st.integers(0, 300), st.integers(0, 300), st.floats(0.0, 4.0), st.booleans())
def test_where_no_request_is_better_off_nothing_changes(
    many: int, few: int, delay: float, missed: bool
) -> None:
    watched, trial = on_trial(400.0)
    alike = [
        ArmCounts(ended=n, missed=n * missed, delay=n * delay, delay_squared=n * delay**2)
        for n in (many, few)
    ]
    for _ in range(40):
        watched.step(60.0, fleet=FLEET, arms=(alike[0], alike[1]))
        assert watched.state.trial in {trial, None}
    assert watched.tuner.values(watched.state)["a"] == 100
