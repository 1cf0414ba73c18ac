"""What `commutator replay --plan` and `--compare-planners` run, and the figures that they show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import evolve, field, frozen

from commutator.config.tree import find
from commutator.contract.planner import (
    EnginePerformance,
    Observation,
    PlannerBudget,
    PlannerConfig,
    PlannerContext,
    PlannerPolicy,
    Proposal,
    Sizing,
)
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.planning import ActionKind, FleetPlanner
from commutator_replay.clairvoyant import Schedule, work_by_second
from commutator_replay.replay import Outcome
from commutator_replay.report import percentile
from commutator_replay.setup import Replays
from commutator_replay.trace import TraceRequest
from commutator_replay.tuning import ReplayTuning, TunedAt
from commutator_replay.virtual import VirtualEngine
from commutator_replay.workforce import Planning, Tick
from commutator_tuning.config import TrialsConfig

FIXED = "fixed"
"""The smallest constant fleet that attains the targets, in hindsight; `fixed:N` is one of N."""
CLAIRVOYANT = "clairvoyant"
"""The cheapest schedule of one form that attains the targets, made from the trace itself."""
OURS = "ours"
"""The file's own planner."""

_OF_A_ROLE = frozenset({"name", "role", "replicas"})
_KNOBS_TRIED = 8
_MARGINS = (-1.0, 8.0)
"""Of the schedules tried: workers beyond the work, in square roots of the work."""


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
    attained: float | None
    """The part that met the target that fewer met; None: nothing was answered."""


@frozen
class PlanReport:
    """What clients would have seen, and what the workers cost, under one planner."""

    planner: str
    requests: int
    """Requests that were answered."""
    refused: int
    """Requests that found the queue full, or waited too long, because every worker was busy."""
    attained_ttft: float
    """Fraction of the requests, refused ones included, whose first token came within the target."""
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
    role_changes: int = 0
    """Workers that were given another role."""
    changes: Sequence[Change] = field(factory=tuple)
    warnings: Mapping[str, int] = field(factory=dict)
    """What plans warned of, and how often."""
    samples: Sequence[Sample] = field(factory=tuple)
    """One for each plan."""
    tuning: Sequence[TunedAt] = field(factory=tuple)
    """What `planner.tuning` did."""
    tuned: Mapping[str, float] = field(factory=dict)
    """The values of the tunable options at the end; empty where tuning is off."""


@frozen
class _Constant(PlannerPolicy[None]):
    role: Role
    workers: int

    def begin(self) -> None:
        return None

    def propose(self, state: None, seen: Observation) -> tuple[None, Sizing]:
        return None, Sizing(roles={self.role: Proposal(workers=self.workers, reason="constant")})


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
            self.check(name, option)
        return names

    def run(self, name: str, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under one planner, as the names that `--compare-planners` takes."""
        kind, _, workers = name.partition(":")
        if kind == FIXED:
            return self.fixed(int(workers), trace) if workers else self._smallest(trace)
        if kind == CLAIRVOYANT:
            return self.cheapest(lambda margin: self.schedule(margin, trace), *_MARGINS)
        return self.planned(name, self.config_of(name), trace)

    def planned(
        self,
        name: str,
        config: PlannerConfig,
        trace: Sequence[TraceRequest],
        make: Callable[[Any, PlannerContext], PlannerPolicy[Any]] | None = None,
    ) -> PlanReport:
        """Replay under the planner of ``config``, or the one that ``make`` makes of it."""
        makers, performance = self._roles()
        if make is None:
            make = self.replays.loaded.host.planners.kinds[config.kind].thing
        policy = make(config, PlannerContext(performance=performance))
        tuning = self._tuning(config, trace)
        planning = Planning(
            planner=FleetPlanner(config, performance, policy),
            make_engine=makers,
            may_become=self._may_become(),
            tuning=tuning,
        )
        report = _plan_report(name, self.replays.outcome(trace, planning=planning), self.config)
        if tuning is None:
            return report
        return evolve(report, tuning=tuning.steps, tuned=tuning.values)

    def _tuning(self, config: PlannerConfig, trace: Sequence[TraceRequest]) -> ReplayTuning | None:
        wanted = config.tuning
        if wanted is None or wanted.mode == "off":
            return None
        if not isinstance(wanted, TrialsConfig):
            problem = f"planner.tuning.kind: {wanted.kind} cannot be replayed, only trials"
            raise ConfigError([problem], self.replays.file)
        return ReplayTuning(self.replays, trace, config.targets, wanted)

    def fixed(self, workers: int, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay with a constant number of ``workers``, whatever bounds and budget say."""
        role, _ = self.only_role()
        bounds = evolve(self.config.bounds, **{role.value: (workers, workers)})
        config = evolve(self.config, bounds=bounds, budget=PlannerBudget())
        return self.under(f"{FIXED}:{workers}", _Constant(role, workers), trace, config, workers)

    def schedule(self, margin: float, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under a schedule made from the trace; ``margin`` is that of ``Schedule``.

        The first workers are ready when the trace begins.
        """
        role, performance = self.only_role()
        work = work_by_second(trace, performance)
        schedule = Schedule(role, margin, work, self.config.start_up_s)
        config = evolve(self.config, interval_s=schedule.interval_s)
        return self.under(CLAIRVOYANT, schedule, trace, config, schedule.workers_at(0.0))

    def under(
        self,
        name: str,
        policy: PlannerPolicy[Any],
        trace: Sequence[TraceRequest],
        config: PlannerConfig,
        first: int | None = None,
    ) -> PlanReport:
        """Replay under a policy of the only role, beginning with ``first`` workers.

        None: with the file's.
        """
        makers, performance = self._roles()
        (role,) = performance
        planner = FleetPlanner(config, performance, policy)
        fleet = None if first is None else self.replays.fleet_of({role: first})
        planning = Planning(planner=planner, make_engine=makers)
        outcome = self.replays.outcome(trace, planning=planning, fleet=fleet)
        return _plan_report(name, outcome, self.config)

    def cheapest(
        self, run: Callable[[float], PlanReport], fewest: float, most: float
    ) -> PlanReport:
        """The cheapest of the replays tried that attained the targets, or the one that did best.

        ``fewest`` and ``most``: the knobs that ``run`` takes of the smallest and the largest fleet.
        """
        goal = self.config.targets.attainment
        tried: list[PlanReport] = []
        for _ in range(_KNOBS_TRIED):
            middle = (fewest + most) / 2
            tried.append(run(middle))
            attains = tried[-1].attained >= goal
            fewest, most = (fewest, middle) if attains else (middle, most)
        if able := [one for one in tried if one.attained >= goal]:
            return min(able, key=lambda one: one.worker_hours)
        return max(tried, key=lambda one: one.attained)

    def only_role(self) -> tuple[Role, EnginePerformance]:
        """The role of all workers, where it is one, and how fast one is."""
        (found,) = self._roles()[1].items()
        return found

    def _roles(
        self,
    ) -> tuple[dict[Role, Callable[[], VirtualEngine]], dict[Role, EnginePerformance]]:
        """What makes a worker of each role, and how fast it is."""
        makers = self.replays.makers_by_role()
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

    def _may_become(self) -> Mapping[Role, Collection[Role]]:
        """The roles that a worker could have instead: those of entries that differ in no more."""
        if self.replays.config.disaggregation is None:
            return {}
        options: dict[Role, Any] = {}
        for entry in self.replays.config.engines:
            found = attrs.asdict(entry, filter=lambda one, _: one.name not in _OF_A_ROLE)
            options.setdefault(Role(entry.role), found)
        return {
            role: [other for other in options if other is not role and options[other] == mine]
            for role, mine in options.items()
        }

    def _smallest(self, trace: Sequence[TraceRequest]) -> PlanReport:
        """The smallest constant fleet within the bounds that attains the targets, or the most."""
        role, _ = self.only_role()
        fewest, most = self.config.bounds.of(role)
        low, high = max(1, fewest), max(1, most)
        found: PlanReport | None = None
        while low < high:
            middle = (low + high) // 2
            tried = self.fixed(middle, trace)
            if tried.attained >= self.config.targets.attainment:
                high, found = middle, tried
            else:
                low = middle + 1
        if found is None or found.most_workers != low:
            found = self.fixed(low, trace)
        return found

    def check(self, name: str, option: str) -> None:
        """Raises ConfigError if the planner ``name`` of ``option`` cannot be run."""
        kind, colon, workers = name.partition(":")
        if kind == FIXED and colon and not (workers.isdecimal() and int(workers)):
            raise ConfigError([f"{name}: expected {FIXED}:N with N workers"], option)
        if kind != FIXED and name != CLAIRVOYANT:
            self.config_of(name, option)
        elif len(self._roles()[1]) > 1:
            raise ConfigError([f"{name}: needs workers of one role only"], option)

    def config_of(self, name: str, option: str = "--compare-planners") -> PlannerConfig:
        """The file's own options, or those that all planners share for another planner."""
        if name in (self.config.kind, OURS):
            return self.config
        kind = self.replays.loaded.host.planners.kinds.get(name)
        if kind is None:
            known = sorted(self.replays.loaded.host.planners.kinds)
            names = ", ".join([*known, OURS, FIXED, f"{FIXED}:N", CLAIRVOYANT])
            raise ConfigError([f'no planner "{name}"; there are {names}'], option)
        fields = attrs.fields(kind.config_class)
        shared = {one.name for one in attrs.fields(PlannerConfig)} - {"kind"}
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


def _plan_report(name: str, outcome: Outcome, config: PlannerConfig) -> PlanReport:
    done, targets = outcome.finished, config.targets
    number = max(1, len(done) + outcome.refused)
    hours: dict[str, float] = {}
    for span in outcome.spans:
        hours[span.role.value] = hours.get(span.role.value, 0.0) + span.hours
    began_s = outcome.ticks[0].plan.time_s
    changes, flips = _changes(outcome.ticks, began_s)
    warnings = Counter(text for tick in outcome.ticks for text in tick.plan.warnings)
    return PlanReport(
        planner=name,
        requests=len(done),
        refused=outcome.refused,
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
        role_changes=sum(
            action.kind is ActionKind.SET_ROLE
            for tick in outcome.ticks
            for action in tick.plan.actions
        ),
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
        attained=tick.attained,
    )
