"""Tunes options while requests are served: propose by replay, try on some, keep or roll back. Pure.

State goes in and out, and time with it: a replay and a deployment run the same code. A trial never
changes the value that an option has; it only names another one for a part of the requests. So
ending the trial is all that a rollback takes, and a front door that loses the planner rolls back
by itself.

A trial has two stages. The canary, a small part of the requests, shows whether the value harms. It
cannot show a gain, because requests share workers: a value that helps its few may harm the others,
and one that relieves a worker helps all alike. The gain is therefore measured by a switchback: all
requests have the value in one period of each pair, which of the two is drawn, and all have the
value before in the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec
from attrs import asdict, evolve, field, frozen

from commutator.config.tunable import TunableOption
from commutator.contract.tuning import ArmCounts, Trial
from commutator_traffic.statistics import gain_by_chance, pooled_z
from commutator_tuning.config import TrialsConfig

_NOT_WORSE = 1.0
"""Standard deviations by which misses may differ by chance."""
_HARM = 3.0
"""Standard deviations from which a value is taken to harm."""
_DRIFT = 1.2
"""Compared with earlier requests, those of a trial may miss this many times as many targets, or be
delayed this many times as long: the load is not the same."""
_PATIENCE = 6.0
"""A stage of a trial is given up after this many times the seconds that it should take."""
_PAIRS = 6
"""Pairs of periods in a switchback."""
_PERIOD = 1 / 2
"""The length of a period as a part of ``canary_s``."""
_WASHED_OUT = 1 / 3
"""The first part of a period, whose requests do not count as its gain: they still meet queues that
the period before has left."""
_BY_CHANCE = 0.05
"""A gain is believed if chance alone gives one as large in at most this part of all switchbacks."""
_FEWEST = 20
"""Below this number of requests with each value, misses and delays say nothing."""
_BARRED_S = 86_400.0
"""A value that did not prove better is not tried again for this long."""


# -------------------------------------------------------------------- tuning


@frozen(kw_only=True)
class Tried:
    """What a replay says of one value of one option."""

    option: str
    value: float
    gain: float
    """The part by which the mean delay of requests is less than with the present value."""


@frozen(kw_only=True)
class Finding:
    """The result of a search."""

    tried: Sequence[Tried] = ()
    requests: int = 0
    """The requests that were replayed."""
    problem: str | None = None
    """Why there is no result."""


@frozen(kw_only=True)
class TuningSeen:
    """What is known at one time."""

    arms: tuple[ArmCounts, ArmCounts] | None = None
    """Requests that ended since the last step, by the value before and the tried one of the trial
    that runs; None: not known."""
    fleet: Mapping[str, int] | None = None
    """Workers by role and phase; None: not known."""
    steady: bool = True
    """Whether no worker starts or drains."""
    finding: Finding | None = None
    """The result of the search, once it has ended."""


class TuningStepKind(StrEnum):
    """What tuning did."""

    SEARCHED = "searched"
    """A search ended without a value to try."""
    ADVISED = "advised"
    """A search found a value that would be tried in the mode act."""
    TRIED = "tried"
    """A share of the requests gets a value from now on."""
    PROMOTED = "promoted"
    """All get it in one of each two periods."""
    SETTLED = "settled"
    """All get it."""
    ROLLED_BACK = "rolled_back"
    """All get the value before."""


@frozen(kw_only=True)
class TuningStep:
    """What changed, for people; and what is to be done."""

    kind: TuningStepKind | None = None
    """None: nothing changed."""
    text: str = ""
    search: bool = False
    """Whether a search is to begin now."""


@frozen(kw_only=True)
class Period:
    """A part of a switchback that has ended."""

    on: bool
    """Whether all requests had the tried value, or all had the one before."""
    counts: ArmCounts
    """Its requests, but for those at its beginning."""


@frozen(kw_only=True)
class TuningState:
    """Everything that tuning remembers; never changed in place."""

    values: Mapping[str, float] = field(factory=dict)
    """Those that proved better than the configured ones, by option."""
    trial: Trial | None = None
    arms: tuple[ArmCounts, ArmCounts] = (ArmCounts(), ArmCounts())
    """Requests of the trial, by the value before and the tried one; without a trial those since the
    last one or the last search, all by the value before."""
    earlier: ArmCounts = ArmCounts()
    """Those before the stage of the trial."""
    periods: tuple[Period, ...] | None = None
    """Of the switchback; None: there is none yet."""
    washed_out: ArmCounts | None = None
    """Requests at the beginning of the present period; None: it is not over."""
    fleet: Mapping[str, int] | None = None
    """Workers when the trial began."""
    since_s: float = 0.0
    """When the stage of the trial began."""
    next_s: float | None = None
    """The time of the next search; None: not known yet."""
    searching: bool = False
    stages: int = 0
    """The number of the last trial."""
    barred: Mapping[tuple[str, float], float] = field(factory=dict)
    """Until when an option is not tried with a value."""


@frozen(kw_only=True)
class _Verdict:
    """What the requests of a trial say."""

    misses_z: float
    failures_z: float
    delay_z: float
    """Below 0: requests are delayed less with the tried value."""

    @property
    def harm(self) -> str | None:
        """Why the value harms; None as far as it is known not to."""
        if self.failures_z > _NOT_WORSE:
            return "more requests fail"
        if self.misses_z > _HARM:
            return f"more requests miss a target, z = {self.misses_z:.2f}"
        if self.delay_z > _HARM:
            return f"requests are delayed more, z = {self.delay_z:.2f}"
        return None


class Tuner:
    """Decides which value is tried, on which requests, and what becomes of it."""

    def __init__(self, config: TrialsConfig, options: Mapping[str, TunableOption]) -> None:
        """``options`` are those that are declared as tunable; nothing else is ever set."""
        self._config = config
        self._options = options

    def values(self, state: TuningState) -> dict[str, float]:
        """The value of each option for requests in no trial."""
        return {option: self._value(state, option) for option in self._options}

    def _value(self, state: TuningState, option: str) -> float:
        return state.values.get(option, self._options[option].value)

    def step(
        self, state: TuningState, seen: TuningSeen, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        """The state after what was ``seen`` at ``now_s``, and what changed."""
        if self._config.mode == "off":
            return state, TuningStep()
        if seen.arms is not None:
            arms = (state.arms[0] + seen.arms[0], state.arms[1] + seen.arms[1])
            state = evolve(state, arms=arms)
        if seen.finding is not None and state.searching:
            return self._decide(evolve(state, searching=False), seen, seen.finding, now_s)
        if state.trial is not None:
            return self._judge(state, state.trial, seen, now_s)
        if state.next_s is None:
            return self._paused(state, now_s), TuningStep()
        if state.searching or now_s < state.next_s:
            return state, TuningStep()
        return evolve(state, searching=True), TuningStep(search=True)

    def _paused(self, state: TuningState, now_s: float) -> TuningState:
        return evolve(state, next_s=now_s + self._config.pause_s, arms=(ArmCounts(), ArmCounts()))

    # ---------------------------------------------------------------- propose

    def _decide(
        self, state: TuningState, seen: TuningSeen, finding: Finding, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        earlier = state.arms[0]
        state = self._paused(state, now_s)
        if finding.problem is not None:
            text = f"no value was looked for: {finding.problem}"
            return state, TuningStep(kind=TuningStepKind.SEARCHED, text=text)
        barred = {key: until for key, until in state.barred.items() if until > now_s}
        state = evolve(state, barred=barred)
        able = [
            one
            for one in finding.tried
            if one.option in self._options
            and self._options[one.option].accepts(one.value)
            and one.value != self._value(state, one.option)
            and (one.option, one.value) not in barred
        ]
        best = max(able, key=lambda one: one.gain, default=None)
        what = f"{len(finding.tried)} values replayed with {finding.requests} requests"
        if best is None or best.gain <= self._config.min_gain:
            text = f"{what}: none is better by more than {self._config.min_gain:.0%}"
            return state, TuningStep(kind=TuningStepKind.SEARCHED, text=text)
        before = self._value(state, best.option)
        trial = Trial(
            number=state.stages + 1,
            option=best.option,
            before=before,
            value=best.value,
            share=self._config.share,
        )
        change = _change(trial)
        why = f"{what}: {best.gain:.0%} less delay"
        if self._config.mode == "advise":
            return state, TuningStep(kind=TuningStepKind.ADVISED, text=f"{change} ({why})")
        if not seen.steady or seen.fleet is None:
            text = f"{change} is not tried now, as the fleet changes ({why})"
            return state, TuningStep(kind=TuningStepKind.SEARCHED, text=text)
        text = f"{change} for {trial.share:.0%} of requests ({why})"
        state = evolve(self._begun(state, trial, now_s), fleet=seen.fleet, earlier=earlier)
        return state, TuningStep(kind=TuningStepKind.TRIED, text=text)

    def _begun(self, state: TuningState, trial: Trial, now_s: float) -> TuningState:
        arms = (ArmCounts(), ArmCounts())
        return evolve(
            state, trial=trial, stages=trial.number, arms=arms, since_s=now_s, washed_out=None
        )

    # ------------------------------------------------------------------ judge

    def _judge(
        self, state: TuningState, trial: Trial, seen: TuningSeen, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        if seen.fleet is not None and seen.fleet != state.fleet:
            return self._rolled_back(state, trial, "the fleet changed meanwhile", now_s, bars=False)
        if state.periods is None:
            return self._judge_canary(state, trial, now_s)
        return self._judge_period(state, state.periods, trial, now_s)

    def _judge_canary(
        self, state: TuningState, trial: Trial, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        before, tried = state.arms
        figures = _figures(before, tried)
        if harm := compared(before, tried).harm or _harm_to_all(state.earlier, before + tried):
            return self._rolled_back(state, trial, f"{harm} ({figures})", now_s, bars=True)
        lasted_s = now_s - state.since_s
        seen_enough = min(before.ended, tried.ended) >= self._config.min_requests
        if lasted_s >= self._config.canary_s and seen_enough:
            state = evolve(state, periods=(), earlier=before + tried)
            text = f"{_change(trial)} for all requests in one of each two periods ({figures})"
            step = TuningStep(kind=TuningStepKind.PROMOTED, text=text)
            return self._switched(state, (), trial, now_s), step
        if lasted_s >= _PATIENCE * self._config.canary_s:
            why = f"too few requests ended after {lasted_s:.0f} s ({figures})"
            return self._rolled_back(state, trial, why, now_s, bars=False)
        return state, TuningStep()

    def _switched(
        self, state: TuningState, periods: tuple[Period, ...], trial: Trial, now_s: float
    ) -> TuningState:
        """The state at the beginning of the period after ``periods``."""
        trial = evolve(trial, number=trial.number + 1)
        on = not periods[-1].on if len(periods) % 2 else _drawn(trial)
        trial = evolve(trial, share=1.0 if on else 0.0)
        return evolve(self._begun(state, trial, now_s), periods=periods)

    def _judge_period(
        self, state: TuningState, periods: tuple[Period, ...], trial: Trial, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        on = trial.share > 0
        counts = state.arms[on]
        off_before, on_before = (_total(periods, on=value) for value in (False, True))
        if on:  # what harms is seen at once, and not at the end of the period
            without, having = off_before if off_before.ended else state.earlier, on_before + counts
            rise = compared(without, having).failures_z > _NOT_WORSE
            if harm := "more requests fail" if rise else _harm_to_all(without, having):
                why = f"{harm} ({_figures(without, having)})"
                return self._rolled_back(state, trial, why, now_s, bars=True)
        lasted_s, takes_s = now_s - state.since_s, _PERIOD * self._config.canary_s
        if state.washed_out is None:
            if lasted_s >= _WASHED_OUT * takes_s:
                state = evolve(state, washed_out=counts)
            return state, TuningStep()
        period = Period(on=on, counts=counts - state.washed_out)
        seen_enough = period.counts.ended * _PAIRS >= self._config.min_requests
        if lasted_s >= takes_s and seen_enough:
            periods = (*periods, period)
            if len(periods) == 2 * _PAIRS:
                return self._concluded(state, periods, trial, now_s)
            return self._switched(state, periods, trial, now_s), TuningStep()
        if lasted_s >= _PATIENCE * takes_s:
            why = f"too few requests ended in a period of {lasted_s:.0f} s"
            return self._rolled_back(state, trial, why, now_s, bars=False)
        return state, TuningStep()

    def _concluded(
        self, state: TuningState, periods: tuple[Period, ...], trial: Trial, now_s: float
    ) -> tuple[TuningState, TuningStep]:
        without, having = (_total(periods, on=value) for value in (False, True))
        chance = gain_by_chance([_difference(*periods[i : i + 2]) for i in range(0, 2 * _PAIRS, 2)])
        figures = f"p = {chance:.3f}; {_figures(without, having)}"
        if compared(without, having).misses_z >= _NOT_WORSE:
            why = f"more requests miss a target ({figures})"
            return self._rolled_back(state, trial, why, now_s, bars=True)
        if chance > _BY_CHANCE:
            why = f"it is not surely better ({figures})"
            return self._rolled_back(state, trial, why, now_s, bars=True)
        values = {**state.values, trial.option: trial.value}
        if trial.value == self._options[trial.option].value:
            del values[trial.option]
        text = f"{_change(trial)} for all requests ({figures})"
        state = self._ended(evolve(state, values=values), now_s)
        return state, TuningStep(kind=TuningStepKind.SETTLED, text=text)

    def _ended(self, state: TuningState, now_s: float) -> TuningState:
        """Without a trial."""
        return self._paused(evolve(state, trial=None, periods=None, washed_out=None), now_s)

    def _rolled_back(
        self, state: TuningState, trial: Trial, why: str, now_s: float, *, bars: bool
    ) -> tuple[TuningState, TuningStep]:
        barred = dict(state.barred)
        if bars:
            barred[trial.option, trial.value] = now_s + _BARRED_S
        state = self._ended(evolve(state, barred=barred), now_s)
        return state, TuningStep(kind=TuningStepKind.ROLLED_BACK, text=rolled_back(trial, why))

    # ------------------------------------------------------------------- kept

    def kept(self, state: TuningState) -> dict[str, Any]:
        """What a restart needs, as plain data."""
        return {
            "values": {
                option: {"value": value, "configured": self._options[option].value}
                for option, value in state.values.items()
            },
            "trial": None if state.trial is None else asdict(state.trial),
            "stages": state.stages,
        }

    def restored(self, kept: Any) -> tuple[TuningState, Sequence[str]]:
        """The state after a restart, and what is to be told of it. A trial has been rolled back.

        A tuned value is dropped where its option is not tunable any more, or the configuration has
        another value than then. Raises ValueError for data that is not from ``kept``.
        """
        try:
            found = msgspec.convert(kept, _Kept)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        told: list[str] = []
        values: dict[str, float] = {}
        for option, one in found.values.items():
            declared = self._options.get(option)
            if declared is None or not declared.accepts(one.value):
                told.append(f"{option} {one.value:g} is dropped: not tunable to it any more")
            elif declared.value != one.configured:
                told.append(f"{option} {one.value:g} is dropped: the configuration has a new value")
            else:
                values[option] = one.value
        if found.trial is not None:
            told.append(rolled_back(found.trial, "the planner ended meanwhile"))
        return TuningState(values=values, stages=found.stages), told


def compared(before: ArmCounts, tried: ArmCounts) -> _Verdict:
    """How the requests with the tried value differ from the others, in standard deviations."""
    failures_z = pooled_z(before.failed, before.ended, tried.failed, tried.ended)
    if min(before.ended, tried.ended) < _FEWEST:
        return _Verdict(misses_z=0.0, failures_z=failures_z, delay_z=0.0)
    return _Verdict(
        misses_z=pooled_z(before.missed, before.ended, tried.missed, tried.ended),
        failures_z=failures_z,
        delay_z=_delay_z(before, tried),
    )


def _harm_to_all(earlier: ArmCounts, now: ArmCounts) -> str | None:
    """Why all requests fare worse since the trial began, whichever value they have.

    They share workers: what a value takes from others, they lack whether they have it or not.
    """
    verdict = compared(earlier, now)
    more = now.missed * earlier.ended > _DRIFT * earlier.missed * now.ended
    if verdict.misses_z > _HARM and more:
        return f"all requests miss more targets than before, z = {verdict.misses_z:.2f}"
    if verdict.delay_z > _HARM and now.mean_delay > _DRIFT * earlier.mean_delay:
        return f"all requests are delayed more than before, z = {verdict.delay_z:.2f}"
    return None


def _difference(one: Period, other: Period) -> float:
    on, off = (one, other) if one.on else (other, one)
    return math.log(_at_least(on.counts.mean_delay)) - math.log(_at_least(off.counts.mean_delay))


def _at_least(delay: float) -> float:
    return max(delay, 1e-6)


def _total(periods: Sequence[Period], *, on: bool) -> ArmCounts:
    return sum((one.counts for one in periods if one.on is on), ArmCounts())


def _drawn(trial: Trial) -> bool:
    """Whether the first period of a pair has the value: a toss, the same wherever it is made."""
    text = f"{trial.option}={trial.value}:{trial.number}".encode()
    return blake2b(text, digest_size=1).digest()[0] % 2 == 0


def _change(trial: Trial) -> str:
    return f"{trial.option} {trial.before:g} -> {trial.value:g}"


def _delay_z(before: ArmCounts, tried: ArmCounts) -> float:
    if math.isclose(before.mean_delay, tried.mean_delay, rel_tol=1e-6):
        return 0.0
    difference = tried.mean_delay - before.mean_delay
    deviation = math.sqrt(before.delay_variance + tried.delay_variance)
    return difference / deviation if deviation else math.copysign(math.inf, difference)


def rolled_back(trial: Trial, why: str) -> str:
    """A line for people."""
    return f"{trial.option} stays {trial.before:g}: {trial.value:g} rolled back, as {why}"


class _KeptValue(msgspec.Struct):
    value: float
    configured: float


class _Kept(msgspec.Struct):
    values: dict[str, _KeptValue]
    trial: Trial | None = None
    stages: int = 0


def _figures(before: ArmCounts, tried: ArmCounts) -> str:
    return (
        f"{tried.ended} requests with it: {tried.missed} misses, {tried.failed} failed, delay "
        f"{tried.mean_delay:.3f}; {before.ended} without: {before.missed}, {before.failed}, "
        f"{before.mean_delay:.3f}"
    )
