"""Values of tunable options, compared by replays; and `planner.tuning` in virtual time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from commutator import DisaggPolicy, RequestSummary
from commutator.config.model import Config
from commutator.config.tunable import TunableOption, tunable_options, with_values
from commutator.contract.planner import PlannedWorker, PlannerTargets, WorkerPhase
from commutator.contract.tuning import ArmCounts, counted, trial_outcome
from commutator.contract.worker import Role
from commutator.routing.model import TunedPolicy, tune, tuned_policies
from commutator.routing.router import Arms, ModelRouter
from commutator_replay.replay import Outcome
from commutator_replay.setup import Replays
from commutator_replay.trace import TraceRequest
from commutator_tuning.config import TrialsConfig
from commutator_tuning.tuner import Finding, Tried, Tuner, TuningSeen, TuningState, TuningStep


@frozen
class Compared:
    """What clients would have seen with one value of one option."""

    option: str
    value: float
    delay: float
    """Mean delay of requests: of their time to the first token and their time between tokens, each
    as a part of its target, at most 4. Refused ones count 4."""
    attained: float
    """The part of the requests that met both targets."""
    gain: float
    """The part by which the delay is less than with the file's values."""


@frozen
class Comparison:
    """The file's values, and others, one at a time."""

    requests: int
    delay: float
    """With the file's values."""
    attained: float
    values: Mapping[str, float]
    """The file's."""
    tried: Sequence[Compared]

    def finding(self) -> Finding:
        """The same for a ``Tuner``."""
        tried = [Tried(option=one.option, value=one.value, gain=one.gain) for one in self.tried]
        return Finding(tried=tried, requests=self.requests)


def compare_values(
    replays: Replays,
    trace: Sequence[TraceRequest],
    targets: PlannerTargets,
    fleet: Mapping[Role, int] | None = None,
) -> Comparison:
    """Replay ``trace`` with each candidate of each tunable option of the file, one at a time.

    ``fleet``: workers by role, instead of the file's.
    """

    def run(config: Config) -> ArmCounts:
        one = evolve(replays, loaded=evolve(replays.loaded, config=config))
        workers = None if fleet is None else one.fleet_of(fleet)
        return _counts(one.outcome(trace, fleet=workers), targets)

    options = tunable_options(replays.config)
    base = run(replays.config)
    tried = []
    for option, value, config in _candidates(replays.config):
        counts = run(config)
        gain = 1 - counts.mean_delay / base.mean_delay if base.mean_delay else 0.0
        tried.append(Compared(option, value, counts.mean_delay, _attained(counts), gain))
    return Comparison(
        requests=base.ended,
        delay=base.mean_delay,
        attained=_attained(base),
        values={path: option.value for path, option in options.items()},
        tried=tried,
    )


_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NEAR = 0.1
"""Of the range, on its scale: how far the nearest values are that are tried."""
_DIGITS = 3


def candidates(option: TunableOption) -> list[float]:
    """Other values to try than the configured one.

    Those at the quarters of the range, which find the region of the best, and one on each side of
    the value, which approach it.
    """
    low, high, scale = option.range.minimum, option.range.maximum, option.range.scale
    inside = min(max(option.value, low), high)
    if scale == "log":
        here = math.log(inside / low) / math.log(high / low)
    else:
        here = (inside - low) / (high - low)

    def at(place: float) -> float:
        value = low * (high / low) ** place if scale == "log" else low + (high - low) * place
        value = round(value) if option.whole else float(f"{value:.{_DIGITS}g}")
        return min(max(value, math.ceil(low) if option.whole else low), high)

    places = sorted({*_QUARTERS, max(0.0, here - _NEAR), min(1.0, here + _NEAR)})
    found = dict.fromkeys(map(at, places))
    return [one for one in found if one != option.value]


def _candidates(config: Config) -> Iterator[tuple[str, float, Config]]:
    for path, option in tunable_options(config).items():
        for value in candidates(option):
            try:
                changed = with_values(config, {path: value})
            except ValueError:  # with the other options it makes no sense
                continue
            yield path, value, changed


def _attained(counts: ArmCounts) -> float:
    return 1 - counts.missed / max(1, counts.ended)


def _counts(outcome: Outcome, targets: PlannerTargets) -> ArmCounts:
    counts = ArmCounts()
    for one in outcome.finished:
        counts += trial_outcome(targets, one.ttft_s, one.itl_s)
    for _ in range(outcome.refused):
        counts += trial_outcome(targets, None, 0.0)
    return counts


# --------------------------------------------------------------- in virtual time


@frozen
class TunedAt:
    """Something that tuning did."""

    time_s: float
    """Of the trace."""
    kind: str
    text: str


@define
class ReplayTuning:
    """Tunes the policies of a replay by trials in virtual time, as the live planner does.

    A search takes no virtual time. It replays what came in ``window_s`` before, at the present
    fleet, so a tuned replay costs, for each search, as many replays of that as there are
    candidates.
    """

    replays: Replays
    trace: Sequence[TraceRequest]
    targets: PlannerTargets
    config: TrialsConfig
    steps: list[TunedAt] = field(factory=list)
    _policies: Sequence[TunedPolicy[Any]] = ()
    _arms: tuple[ArmCounts, ArmCounts] = (ArmCounts(), ArmCounts())
    _running: dict[str, tuple[int, bool]] = field(factory=dict)
    """By id, the trial in which a request began, and whether it has the tried value."""
    _finding: Finding | None = None
    _state: TuningState = field(factory=TuningState)
    _tuner: Tuner = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tuner = Tuner(self.config, tunable_options(self.replays.config))

    @property
    def values(self) -> Mapping[str, float]:
        """The present value of each tunable option."""
        return self._tuner.values(self._state)

    def begin(
        self, router: ModelRouter, disagg: Arms[DisaggPolicy] | None, prefill: ModelRouter | None
    ) -> None:
        """Called once, with what has the policies of the replay."""
        config, host = self.replays.config, self.replays.loaded.host
        self._policies = tuned_policies(config, host, router, disagg, prefill)

    def arrived(self, request: RequestSummary) -> None:
        trial = self._state.trial
        taken = (0, False) if trial is None else (trial.number, trial.takes(request))
        self._running[request.request_id] = taken

    def ended(self, request_id: str, ttft_s: float | None, itl_s: float = 0.0) -> None:
        """A request was answered; ``ttft_s`` is None if it was refused."""
        number, takes = self._running.pop(request_id)
        trial = self._state.trial
        if number == (0 if trial is None else trial.number):
            outcome = trial_outcome(self.targets, ttft_s, itl_s)
            self._arms = counted(self._arms, takes, outcome)

    def tick(self, now_s: float, workers: Sequence[PlannedWorker]) -> None:
        """Take the next step, with the fleet as it is."""
        before = self._state.trial, self._state.values
        seen = TuningSeen(
            arms=self._arms,
            fleet=Counter(f"{one.role} {one.phase}" for one in workers),
            steady=all(one.phase is WorkerPhase.READY for one in workers),
            finding=self._finding,
        )
        self._arms, self._finding = (ArmCounts(), ArmCounts()), None
        self._state, step = self._tuner.step(self._state, seen, now_s)
        if step.search:
            self._finding = self._search(now_s, workers)
        self._tell(now_s, step)
        if (self._state.trial, self._state.values) != before:
            tune(self._policies, self.replays.config, self._state.values, self._state.trial)

    def _tell(self, now_s: float, step: TuningStep) -> None:
        if step.kind is not None:
            self.steps.append(TunedAt(now_s, step.kind.value, step.text))

    def _search(self, now_s: float, workers: Sequence[PlannedWorker]) -> Finding:
        def place(time_s: float) -> int:
            return bisect_right(self.trace, time_s * 1000, key=lambda one: one.timestamp)

        end = place(now_s)
        begin = max(place(now_s - self.config.window_s), end - self.config.max_requests)
        if begin == end:
            return Finding(problem="no requests came")
        part = self.trace[begin:end]
        loaded = self.replays.loaded
        config = with_values(loaded.config, self._state.values)
        replays = evolve(self.replays, loaded=evolve(loaded, config=config))
        fleet = Counter(one.role for one in workers if one.phase is WorkerPhase.READY)
        return compare_values(replays, part, self.targets, fleet).finding()
