"""What `commutator replay --plan` and `--compare-planners` run, and the figures that they show."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from attrs import evolve, field, frozen

from commutator.config.tree import find
from commutator.contract.planner import (
    EnginePerformance,
    Forecaster,
    PlannerConfig,
    PlannerPolicy,
    Proposal,
    Situation,
)
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.planner.pipeline import Planner, no_growth
from commutator_replay.fleet import VirtualWorker
from commutator_replay.replay import Outcome
from commutator_replay.report import percentile
from commutator_replay.setup import Replays
from commutator_replay.trace import TraceRequest
from commutator_replay.virtual import VirtualEngine
from commutator_replay.workforce import Planning, Tick

__all__ = [
    "CLAIRVOYANT",
    "FIXED",
    "Change",
    "PlanReport",
    "PlannedReplays",
    "Sample",
]

FIXED = "fixed"
"""The smallest constant fleet that attains the targets, in hindsight; `fixed:N` is one of N."""
CLAIRVOYANT = "clairvoyant"
"""The file's own planner, with a forecast that knows the trace."""

_LEVEL_S = 60.0


@frozen
class Change:
    """A plan that changed the number of workers of a role."""

    time_s: float
    """Since the first request."""
    role: str
    before: int
    after: int
    reason: str


@frozen
class Sample:
    """The fleet at one time, and what came."""

    time_s: float
    requests_per_s: float
    need: int
    desired: int
    ready: int


@frozen
class PlanReport:
    """What clients would have seen, and what the workers cost, under one planner."""

    planner: str
    requests: int
    attained_ttft: float
    """Fraction of the requests whose first token came within the target."""
    attained_itl: float
    """The same for the mean time between tokens."""
    attained: float
    """The fraction that met both."""
    ttft_p99_s: float
    itl_p99_s: float
    """Of requests' means."""
    worker_hours: float
    """From launch to exit, start-up and drain included."""
    worker_hours_by_role: Mapping[str, float]
    most_workers: int
    """The largest number of workers that got requests at once."""
    flips: int
    """Changes of direction, from growing to shrinking or back."""
    changes: Sequence[Change] = field(factory=tuple)
    warnings: Mapping[str, int] = field(factory=dict)
    """What plans warned of, and how often."""
    samples: Sequence[Sample] = field(factory=tuple)
    """One for each plan."""


class _Constant(PlannerPolicy):
    def __init__(self, workers: int) -> None:
        self._workers = workers

    def propose(self, situation: Situation) -> Mapping[Role, Proposal]:
        return {
            role: Proposal(workers=self._workers, reason="constant") for role in situation.demands
        }


class _Foresight(Forecaster[float]):
    """Knows the work of every minute of the trace. Its state is the time."""

    def __init__(self, trace: Sequence[TraceRequest], performance: EnginePerformance) -> None:
        self._times_s = [one.timestamp / 1000 for one in trace]
        self._sums = [0.0]
        for one in trace:
            work_s = performance.work_s(one.input_length, one.output_length)
            self._sums.append(self._sums[-1] + work_s)

    def begin(self) -> float:
        return 0.0

    def update(self, state: float, time_s: float, level: float, lead_s: float) -> float:
        return time_s

    def growth(self, state: float, lead_s: float) -> float:
        now = self._level(state)
        step_s = min(5.0, lead_s)
        steps = int(lead_s / step_s)
        most = max(self._level(state + step * step_s) for step in range(1, steps + 1))
        return max(most / now, 1e-3) if now else 1.0

    def _level(self, time_s: float) -> float:
        last = bisect_right(self._times_s, time_s)
        first = bisect_right(self._times_s, time_s - _LEVEL_S)
        return self._sums[last] - self._sums[first]


@frozen
class PlannedReplays:
    """Runs one file's trace under several planners."""

    replays: Replays

    @property
    def config(self) -> PlannerConfig:
        """The section `planner` of the file. Raises ConfigError where it has none."""
        config = self.replays.config.planner
        if config is None:
            problem = "planner: required to plan a replay, such as planner: {kind: slo}"
            raise ConfigError([problem], self.replays.file)
        return config

    def names(self, written: str, option: str) -> list[str]:
        """The planners that ``option`` lists. Raises ConfigError if one cannot be run."""
        names = [name.strip() for name in written.split(",")]
        for name in names:
            self._check(name, option)
        return names

    def run(self, name: str, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under one planner."""
        makers, performance = self._roles()
        if name == FIXED:
            return self._smallest(trace, makers, performance)
        if name.startswith(f"{FIXED}:"):
            return self._constant(name, int(name.partition(":")[2]), trace, makers, performance)
        config, host = self.config, self.replays.loaded.host
        if name == CLAIRVOYANT:
            (serving,) = (role for role in performance if role is not Role.PREFILL)
            forecaster: Forecaster[Any] = _Foresight(trace, performance[serving])
            config = evolve(config, hold_s=0.0)
        else:
            config = self._config(name)
            wanted = config.forecaster
            forecaster = (
                no_growth() if wanted is None else host.forecasters.kinds[wanted.kind].thing(wanted)
            )
        policy = host.planners.kinds[config.kind].thing(config)
        constraints = [host.constraints.kinds[c.kind].thing(c) for c in config.constraints]
        planner = Planner(config, performance, policy, forecaster, constraints)
        fleet = self.replays.fleet(roles=self._has_roles)
        return self._report(name, trace, Planning(
            planner=planner, config=config, make_engine=makers
        ), fleet)  # fmt: skip

    @property
    def _has_roles(self) -> bool:
        return self.replays.config.disaggregation is not None

    def _roles(
        self,
    ) -> tuple[dict[Role, Callable[[], VirtualEngine]], dict[Role, EnginePerformance]]:
        """What makes a worker of each role, and how fast it is."""
        makers: dict[Role, Callable[[], VirtualEngine]] = {}
        for role, make in self.replays.makers(roles=self._has_roles):
            makers.setdefault(role, make)
        if Role.BOTH in makers and Role.DECODE in makers:
            problem = "engines: a plan needs one role that decodes: both or decode, not the two"
            raise ConfigError([problem], self.replays.file)
        performance: dict[Role, EnginePerformance] = {}
        for role, make in makers.items():
            if (speed := make().performance) is None:
                problem = f"engines: the model of the {role} workers tells no performance; use sim"
                raise ConfigError([problem], self.replays.file)
            performance[role] = speed
        for role in Role:
            option = ("planner", "bounds", role.value)
            if role not in makers and find(self.replays.loaded.tree, option) is not None:
                problem = f"{'.'.join(option)}: no worker has this role in a replay of this file"
                raise ConfigError([problem], self.replays.file)
        budget = self.config.budget.workers
        fewest = sum(self.config.bounds.of(role)[0] for role in performance)
        if budget is not None and fewest > budget:
            problem = f"planner.budget.workers: {budget} is less than the {fewest} of the bounds"
            raise ConfigError([problem], self.replays.file)
        return makers, performance

    def _constant(
        self,
        name: str,
        workers: int,
        trace: Sequence[TraceRequest],
        makers: Mapping[Role, Callable[[], VirtualEngine]],
        performance: Mapping[Role, EnginePerformance],
    ) -> PlanReport:
        (role,) = performance
        bounds = evolve(self.config.bounds, **{role.value: (workers, workers)})
        config = evolve(self.config, bounds=bounds, budget=type(self.config.budget)())
        planner = Planner(config, performance, _Constant(workers), no_growth())
        planning = Planning(planner=planner, config=config, make_engine=makers)
        fleet = [
            VirtualWorker.make(f"worker-{number:03}", makers[role](), role)
            for number in range(workers)
        ]
        return self._report(name, trace, planning, fleet)

    def _smallest(
        self,
        trace: Sequence[TraceRequest],
        makers: Mapping[Role, Callable[[], VirtualEngine]],
        performance: Mapping[Role, EnginePerformance],
    ) -> PlanReport:
        """The smallest constant fleet within the bounds that attains the targets, or the most."""
        (role,) = performance
        fewest, most = self.config.bounds.of(role)
        low, high = max(1, fewest), max(1, most)
        found: PlanReport | None = None
        while low < high:
            middle = (low + high) // 2
            tried = self._constant(f"{FIXED}:{middle}", middle, trace, makers, performance)
            if tried.attained >= self.config.targets.attainment:
                high, found = middle, tried
            else:
                low = middle + 1
        if found is None or found.most_workers != low:
            found = self._constant(f"{FIXED}:{low}", low, trace, makers, performance)
        return found

    def _check(self, name: str, option: str) -> None:
        if name == FIXED or name.startswith(f"{FIXED}:"):
            number = name.partition(":")[2]
            if name != FIXED and not (number.isdecimal() and int(number)):
                raise ConfigError([f"{name}: expected {FIXED}:N with N workers"], option)
            if len(self._roles()[1]) > 1:
                raise ConfigError([f"{name}: needs workers of one role only"], option)
        elif name != CLAIRVOYANT:
            self._config(name, option)

    def _config(self, name: str, option: str = "--compare-planners") -> PlannerConfig:
        """The file's own options, or those that all planners share for another planner."""
        if name == self.config.kind:
            return self.config
        kind = self.replays.loaded.host.planners.kinds.get(name)
        if kind is None:
            known = sorted(self.replays.loaded.host.planners.kinds)
            names = ", ".join([*known, FIXED, f"{FIXED}:N", CLAIRVOYANT])
            raise ConfigError([f'no planner "{name}"; there are {names}'], option)
        fields = attrs.fields(kind.config_class)
        shared = {one.name for one in attrs.fields(PlannerConfig)} - {"kind", "forecaster"}
        needed = [
            one.name
            for one in fields
            if one.default is attrs.NOTHING and one.name not in {*shared, "kind"}
        ]
        if needed:
            problem = f"{name} needs options ({', '.join(needed)}): make it the planner of the file"
            raise ConfigError([problem], option)
        options = {option: getattr(self.config, option) for option in shared}
        config: PlannerConfig = kind.config_class(kind=name, **options)
        return config

    def _report(
        self,
        name: str,
        trace: Sequence[TraceRequest],
        planning: Planning,
        fleet: Sequence[VirtualWorker],
    ) -> PlanReport:
        outcome = self.replays.planned(trace, planning, fleet)
        return _plan_report(name, outcome, self.config)


def _plan_report(name: str, outcome: Outcome, config: PlannerConfig) -> PlanReport:
    done, targets = outcome.finished, config.targets
    number = max(1, len(done))
    hours: dict[str, float] = {}
    for span in outcome.spans:
        hours[span.role.value] = hours.get(span.role.value, 0.0) + span.hours
    began_s = outcome.ticks[0].plan.time_s
    changes, flips = _changes(outcome.ticks, began_s)
    warnings = Counter(text for tick in outcome.ticks for text in tick.plan.warnings)
    return PlanReport(
        planner=name,
        requests=len(done),
        attained_ttft=sum(one.ttft_s <= targets.ttft_s for one in done) / number,
        attained_itl=sum(one.itl_s <= targets.itl_s for one in done) / number,
        attained=sum(one.ttft_s <= targets.ttft_s and one.itl_s <= targets.itl_s for one in done)
        / number,
        ttft_p99_s=percentile(sorted(one.ttft_s for one in done), 0.99),
        itl_p99_s=percentile(sorted(one.itl_s for one in done), 0.99),
        worker_hours=sum(hours.values()),
        worker_hours_by_role=hours,
        most_workers=max(
            sum(role.ready for role in tick.plan.roles.values()) for tick in outcome.ticks
        ),
        flips=flips,
        changes=changes,
        warnings=dict(warnings),
        samples=[_sample(tick, began_s) for tick in outcome.ticks],
    )


def _changes(ticks: Sequence[Tick], began_s: float) -> tuple[list[Change], int]:
    """What plans changed, and how often a role changed its direction."""
    changes: list[Change] = []
    flips = 0
    growing: dict[Role, bool] = {}
    before = {role: one.ready for role, one in ticks[0].plan.roles.items()}
    for tick in ticks:
        for role, one in tick.plan.roles.items():
            if one.desired == before[role]:
                continue
            grows = one.desired > before[role]
            flips += growing.get(role, grows) is not grows
            growing[role] = grows
            time_s = tick.plan.time_s - began_s
            changes.append(Change(time_s, role.value, before[role], one.desired, one.reason))
            before[role] = one.desired
    return changes, flips


def _sample(tick: Tick, began_s: float) -> Sample:
    roles = tick.plan.roles.values()
    return Sample(
        time_s=tick.plan.time_s - began_s,
        requests_per_s=tick.offered,
        need=sum(one.desired if one.proposed is None else one.proposed for one in roles),
        desired=sum(one.desired for one in roles),
        ready=sum(one.ready for one in roles),
    )
