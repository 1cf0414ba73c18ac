"""Tuning tries a value on a few requests, and keeps it only if it proves better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import msgspec
import pytest
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.config.tunable import TunableOption
from commutator.contract.planner import PlannerTargets
from commutator.contract.request import RequestSummary
from commutator.contract.settings import Tunable
from commutator.contract.tuning import ArmCounts, Trial, trial_outcome
from commutator_traffic.statistics import gain_by_chance, pooled_z
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
FLEET = {"both ready": 2}


def option(value: float, least: float, most: float) -> TunableOption:
    within = Tunable(minimum=least, maximum=most)
    return TunableOption(path="test", steps=(), range=within, value=value, whole=False)


OPTIONS = {"a": option(100, 16, 4096), "b": option(2, 1, 64)}


def arms(
    before: tuple[int, int], tried: tuple[int, int], delays: tuple[float, float] = (0.5, 0.5)
) -> tuple[ArmCounts, ArmCounts]:
    """Requests and misses with each value, whose delays vary by a fifth."""
    made = []
    for (ended, missed), delay in zip((before, tried), delays, strict=True):
        squared = ended * delay**2 * 1.04
        made.append(
            ArmCounts(ended=ended, missed=missed, delay=ended * delay, delay_squared=squared)
        )
    return made[0], made[1]


class Course:
    """A tuner through its steps, in virtual time."""

    def __init__(self, config: TrialsConfig = CONFIG, options: Mapping[str, Any] = OPTIONS) -> None:
        self.tuner = Tuner(config, options)
        self.state = TuningState()
        self.now_s = 0.0
        self.step(0.0)

    def step(self, seconds: float, **seen: Any) -> TuningStep:
        self.now_s += seconds
        seen = {"fleet": FLEET, **seen}
        self.state, step = self.tuner.step(self.state, TuningSeen(**seen), self.now_s)
        return step

    def find(self, *tried: Tried, **seen: Any) -> TuningStep:
        """Wait for a search and end it."""
        self.step(0.0)
        assert not self.step(CONFIG.pause_s - 1.0).search
        assert self.step(1.0).search
        assert not self.step(5.0).search, "one search at a time"
        return self.step(5.0, finding=Finding(tried=tried, requests=1000), **seen)

    def switch(self, without: ArmCounts, having: ArmCounts) -> TuningStep:
        """Go through a switchback with the same requests in each period; returns its last step."""
        step = TuningStep()
        while step.kind is None:
            step = switched(self, without, having)
        return step

    def tries(self, value: float = 400) -> Trial:
        step = self.find(Tried(option="a", value=value, gain=0.2))
        assert step.kind is TuningStepKind.TRIED
        assert self.state.trial is not None
        return self.state.trial


def switched(course: Course, without: ArmCounts, having: ArmCounts) -> TuningStep:
    """Go through one period."""
    trial = course.state.trial
    assert trial is not None
    on = bool(trial.share)
    course.step(50.0)
    nothing = ArmCounts()
    return course.step(100.0, arms=(nothing, having) if on else (without, nothing))


def promoted() -> Course:
    """At the beginning of a switchback."""
    course = Course()
    course.tries()
    step = course.step(300.0, arms=arms((1800, 40), (200, 2)))
    assert step.kind is TuningStepKind.PROMOTED
    return course


def until_on(course: Course, without: ArmCounts) -> None:
    """Go on to a period in which all requests have the value."""
    while course.state.trial is None or not course.state.trial.share:
        assert switched(course, without, without).kind is None


def test_a_canary_with_more_misses_is_rolled_back_at_once() -> None:
    """Vector V10."""
    assert pooled_z(40, 2000, 12, 200) == pytest.approx(3.55, abs=0.005)
    course = Course()
    course.tries()
    step = course.step(10.0, arms=arms((2000, 40), (200, 12)))
    assert step.kind is TuningStepKind.ROLLED_BACK, "at once, not at the end of the canary"
    assert "z = 3.55" in step.text
    assert course.tuner.values(course.state) == {"a": 100, "b": 2}
    assert course.state.trial is None


def test_a_better_value_goes_from_a_tenth_to_every_other_period_to_all() -> None:
    course = Course()
    trial = course.tries()
    assert (trial.option, trial.before, trial.value, trial.share) == ("a", 100, 400, 0.1)
    alike = arms((1800, 40), (200, 2))  # they share workers: the others gain as much
    assert course.step(299.0, arms=alike).kind is None, "not before five minutes"
    step = course.step(1.0)
    assert step.kind is TuningStepKind.PROMOTED
    assert "one of each two periods" in step.text
    off, on = arms((100, 2), (100, 1), (0.5, 0.3))
    shares = []
    for _ in range(12):
        assert course.state.trial is not None
        shares.append(course.state.trial.share)
        assert course.tuner.values(course.state)["a"] == 100, "a restart would still go back"
        step = switched(course, off, on)
    assert all({*shares[i : i + 2]} == {0.0, 1.0} for i in range(0, 12, 2)), "one of each two"
    assert 0 < sum(shares[::2]) < 6, "drawn"
    assert step.kind is TuningStepKind.SETTLED
    assert "p = 0.016" in step.text, "of 64 outcomes of the draws none is better"
    assert course.tuner.values(course.state) == {"a": 400, "b": 2}


def test_what_the_period_before_has_left_does_not_count() -> None:
    """The first requests of each period still wait behind those of the other value."""
    course = promoted()
    off, on = arms((100, 2), (100, 1), (0.5, 0.4))
    late = arms((100, 2), (100, 2), (0.6, 0.55))
    step = TuningStep()
    while step.kind is None:
        assert course.state.trial is not None
        has = bool(course.state.trial.share)
        nothing = ArmCounts()
        course.step(49.0, arms=(nothing, late[1]) if has else (late[0], nothing))
        course.step(1.0)
        step = course.step(100.0, arms=(nothing, on) if has else (off, nothing))
    assert step.kind is TuningStepKind.SETTLED
    assert "delay 0.400; 600 without: 12, 0, 0.500" in step.text


def test_a_period_waits_for_its_requests() -> None:
    course = promoted()
    before = course.state.trial
    few, enough = (ArmCounts(ended=n, delay=0.5 * n, delay_squared=0.25 * n) for n in (33, 34))
    assert switched(course, few, few).kind is None
    assert course.state.trial == before, "200 in six periods are 34 in each"
    switched(course, enough - few, enough - few)
    assert course.state.trial != before
    course.step(50.0)
    step = course.step(6 * 150.0 - 50.0)
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert "too few requests ended in a period" in step.text


@given(st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_whatever_the_load_does_chance_settles_one_switchback_in_twenty_at_most(
    differences: list[float],
) -> None:
    """Without an effect, the draw of each pair's order decides the sign of its difference."""
    draws = product((1, -1), repeat=6)
    chances = [
        gain_by_chance([sign * one for sign, one in zip(signs, differences, strict=True)])
        for signs in draws
    ]
    assert sum(chance <= 0.05 for chance in chances) <= 0.05 * len(chances)


@pytest.mark.parametrize(
    ("having", "why"),
    [
        (arms((0, 0), (200, 20))[1], "miss more targets"),
        (arms((0, 0), (200, 2), (0.5, 0.9))[1], "are delayed more"),
        (evolve(arms((0, 0), (200, 2))[1], failed=2), "more requests fail"),
    ],
)
def test_a_value_that_harms_only_where_all_have_it_is_rolled_back(
    having: ArmCounts, why: str
) -> None:
    course = promoted()
    until_on(course, arms((200, 2), (0, 0))[0])
    step = course.step(5.0, arms=(ArmCounts(), having))
    assert step.kind is TuningStepKind.ROLLED_BACK, "at once, not at the end of the period"
    assert why in step.text
    assert course.tuner.values(course.state)["a"] == 100


@pytest.mark.parametrize(
    ("having", "why"),
    [
        (arms((0, 0), (200, 2), (0.5, 0.5))[1], "not surely better"),
        (arms((0, 0), (200, 4), (0.5, 0.4))[1], "more requests miss a target"),
    ],
)
def test_a_value_without_gain_is_rolled_back_after_its_switchback(
    having: ArmCounts, why: str
) -> None:
    course = promoted()
    step = course.switch(arms((200, 2), (0, 0))[0], having)
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert why in step.text
    assert course.tuner.values(course.state)["a"] == 100
    assert course.find(Tried(option="a", value=400, gain=0.2)).kind is TuningStepKind.SEARCHED


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (arms((1800, 180), (200, 20)), "all requests miss more targets than before"),
        (arms((1800, 40), (200, 4), (0.75, 0.74)), "all requests are delayed more than before"),
    ],
)
def test_a_value_that_harms_those_who_do_not_have_it_is_rolled_back(
    now: tuple[ArmCounts, ArmCounts], why: str
) -> None:
    """Requests share workers, so the others suffer as much, and comparing the two shows nothing."""
    course = Course()
    course.step(0.0, arms=arms((2000, 40), (0, 0)))
    course.tries()
    step = course.step(5.0, arms=now)
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert why in step.text


def test_a_little_more_load_than_before_is_no_harm() -> None:
    course = Course()
    course.step(0.0, arms=arms((2000, 200), (0, 0)))
    course.tries()
    now = arms((18_000, 2000), (2000, 210), (0.58, 0.55))
    assert course.step(300.0, arms=now).kind is TuningStepKind.PROMOTED


def test_any_rise_of_failures_rolls_back() -> None:
    course = Course()
    course.tries()
    before, tried = arms((180, 0), (20, 0), (0.5, 0.1))
    step = course.step(5.0, arms=(before, evolve(tried, failed=1, missed=1)))
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert "more requests fail" in step.text


def test_failures_that_both_values_have_are_no_rise() -> None:
    course = Course()
    course.tries()
    before, tried = arms((1800, 18), (200, 2), (0.5, 0.3))
    both = evolve(before, failed=18), evolve(tried, failed=2)
    assert course.step(300.0, arms=both).kind is TuningStepKind.PROMOTED


def test_a_change_of_the_fleet_rolls_back_and_the_value_may_be_tried_again() -> None:
    course = Course()
    course.tries()
    step = course.step(5.0, fleet={"both ready": 3})
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert "the fleet changed" in step.text
    course.tries()


def test_nothing_is_tried_while_the_fleet_changes() -> None:
    course = Course()
    step = course.find(Tried(option="a", value=400, gain=0.2), steady=False)
    assert step.kind is TuningStepKind.SEARCHED
    assert course.state.trial is None


def test_a_canary_of_too_few_requests_is_given_up() -> None:
    course = Course()
    course.tries()
    assert course.step(1799.0, arms=arms((90, 1), (10, 0))).kind is None
    step = course.step(1.0)
    assert step.kind is TuningStepKind.ROLLED_BACK
    assert "too few requests" in step.text


def test_a_value_that_was_not_better_is_left_alone_for_a_day() -> None:
    course = Course()
    course.tries(400)
    course.step(10.0, arms=arms((2000, 40), (200, 12)))
    both = (Tried(option="a", value=400, gain=0.2), Tried(option="b", value=4, gain=0.1))
    course.find(*both)
    assert course.state.trial is not None
    assert course.state.trial.option == "b"
    course.step(1.0, fleet={})
    course.step(86_400.0)
    course.step(1.0, finding=Finding(tried=both))
    assert course.state.trial is not None
    assert course.state.trial.option == "a"


@pytest.mark.parametrize(
    "tried",
    [
        Tried(option="router.busy.max_queue_s", value=10, gain=0.9),
        Tried(option="a", value=15, gain=0.9),
        Tried(option="a", value=4097, gain=0.9),
        Tried(option="a", value=100, gain=0.9),
        Tried(option="a", value=400, gain=0.05),
    ],
    ids=["not declared", "below", "above", "the present value", "too little gain"],
)
def test_what_is_not_declared_or_gains_too_little_is_never_tried(tried: Tried) -> None:
    course = Course()
    assert course.find(tried).kind is TuningStepKind.SEARCHED
    assert course.state == TuningState(next_s=course.now_s + CONFIG.pause_s)


def test_in_the_mode_advise_nothing_changes() -> None:
    course = Course(evolve(CONFIG, mode="advise"))
    step = course.find(Tried(option="a", value=400, gain=0.2))
    assert step.kind is TuningStepKind.ADVISED
    assert step.text == "a 100 -> 400 (1 values replayed with 1000 requests: 20% less delay)"
    assert course.state.trial is None


def test_switched_off_nothing_happens() -> None:
    tuner = Tuner(evolve(CONFIG, mode="off"), OPTIONS)
    for now_s in (0.0, 1e6):
        state, step = tuner.step(TuningState(), TuningSeen(fleet=FLEET), now_s)
        assert (state, step) == (TuningState(), TuningStep())


def test_a_search_that_fails_is_told_and_repeated_later() -> None:
    course = Course()
    course.step(CONFIG.pause_s)
    step = course.step(1.0, finding=Finding(problem="no requests came"))
    assert step.text == "no value was looked for: no requests came"
    assert not course.step(CONFIG.pause_s - 1.0).search
    assert course.step(1.0).search


def restart(course: Course, options: Mapping[str, Any] = OPTIONS) -> tuple[Course, list[str]]:
    """The same from what its state file keeps."""
    kept = json.loads(json.dumps(course.tuner.kept(course.state)))
    again = Course(options=options)
    again.state, told = again.tuner.restored(kept)
    return again, list(told)


def test_a_restart_in_the_middle_of_a_canary_rolls_back() -> None:
    course = Course()
    settle(course)
    trial = course.tries(1000)
    assert trial.before == 400
    again, told = restart(course)
    assert told == ["a stays 400: 1000 rolled back, as the planner ended meanwhile"]
    assert again.state.trial is None
    assert again.tuner.values(again.state) == {"a": 400, "b": 2}
    assert again.tries(1000).number > trial.number, "no front door takes it for an earlier trial"


def settle(course: Course) -> None:
    course.tries()
    course.step(300.0, arms=arms((1800, 40), (200, 2)))
    assert course.switch(*arms((200, 4), (200, 2), (0.5, 0.3))).kind is TuningStepKind.SETTLED
    assert course.tuner.values(course.state)["a"] == 400


def test_a_tuned_value_ends_with_the_configured_one_that_it_replaced() -> None:
    course = Course()
    settle(course)
    _, told = restart(course, {**OPTIONS, "a": option(200, 16, 4096)})
    assert told == ["a 400 is dropped: the configuration has a new value"]
    again, told = restart(course, {"b": OPTIONS["b"]})
    assert told == ["a 400 is dropped: not tunable to it any more"]
    assert again.state.values == {}
    with pytest.raises(ValueError, match="values"):
        course.tuner.restored({"value": 3})


def test_a_configured_value_that_proves_best_again_is_no_tuned_value() -> None:
    course = Course()
    settle(course)
    course.tries(100)
    course.step(300.0, arms=arms((1800, 40), (200, 2)))
    course.switch(*arms((200, 4), (200, 2), (0.5, 0.3)))
    assert course.state.values == {}
    assert course.tuner.values(course.state)["a"] == 100


def request(name: str, session: str | None = None) -> RequestSummary:
    return RequestSummary(
        request_id=name, model="m", prompt_tokens=9, max_tokens=9, session_id=session
    )


def test_a_trial_takes_its_share_of_the_requests_and_whole_conversations() -> None:
    tenth = Trial(number=1, option="a", before=1.0, value=2.0, share=0.1)
    most = evolve(tenth, number=2, share=0.9)
    takes = {name: tenth.takes(request(str(name))) for name in range(5000)}
    assert 430 < sum(takes.values()) < 570
    assert all(most.takes(request(str(name))) for name, taken in takes.items() if taken)
    other = evolve(tenth, value=3.0)
    both = sum(taken and other.takes(request(str(name))) for name, taken in takes.items())
    assert both < 100, "another trial takes others"
    for session in map(str, range(50)):
        assert len({tenth.takes(request(str(name), session)) for name in range(20)}) == 1
    assert tenth.takes(request("\ud800")) in {True, False}, "clients choose ids"
    assert msgspec.convert(json.loads(json.dumps(asdict(tenth))), Trial) == tenth


def test_a_request_counts_by_its_delay_and_its_misses() -> None:
    targets = PlannerTargets(ttft_s=0.5, itl_s=0.05)
    inside = trial_outcome(targets, 0.25, 0.05)
    assert (inside.delay, inside.missed, inside.failed) == (0.75, False, False)
    late = trial_outcome(targets, 100.0, 0.0)
    assert (late.delay, late.missed, late.failed) == (2.0, True, False)
    failed = trial_outcome(targets, None, 0.0)
    assert (failed.delay, failed.missed, failed.failed) == (4.0, True, True)
    both = inside + late
    assert (both.ended, both.missed, both.mean_delay) == (2, 1, 1.375)
    assert both.delay_variance == pytest.approx(0.625**2 / 2)
    assert both - late == inside
