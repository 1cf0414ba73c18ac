"""What `commutator replay --plan` and `--compare-planners` run, and the figures that they show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import evolve, field, frozen

from commutator.config.tree import find
from commutator.contract.planner import (
    EnginePerformance,
    Observation,
    PlannerConfig,
    PlannerContext,
    PlannerPolicy,
    Proposal,
    Sizing,
)
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.planning import ActionKind, FleetPlanner
from commutator_replay.fleet import VirtualWorker
from commutator_replay.peers import PEERS, Peer, PeerPlanner, Schedule
from commutator_replay.replay import Outcome
from commutator_replay.report import percentile
from commutator_replay.setup import Replays
from commutator_replay.trace import TraceRequest
from commutator_replay.tuning import ReplayTuning, TunedAt
from commutator_replay.virtual import VirtualEngine
from commutator_replay.workforce import Planning, Tick
from commutator_slo.config import SloConfig
from commutator_slo.policy import Slo, forecaster_of
from commutator_slo.situation import Forecaster
from commutator_tuning.config import TrialsConfig

__all__ = [
    "BEST",
    "CLAIRVOYANT",
    "FIXED",
    "OURS",
    "Change",
    "PlanReport",
    "PlannedReplays",
    "Sample",
    "work_by_second",
]

FIXED = "fixed"
"""The smallest constant fleet that attains the targets, in hindsight; `fixed:N` is one of N."""
CLAIRVOYANT = "clairvoyant"
"""The cheapest schedule of one form that attains the targets, made from the trace itself."""
OURS = "ours"
"""The file's own planner."""
BEST = "best"
"""In the place of a knob: the one of the cheapest fleet that attains the targets, in hindsight."""

_OF_A_ROLE = frozenset({"name", "role", "replicas"})
_KNOBS_TRIED = 8
_MOST_MARGIN = 8.0
"""For schedules: the most workers beyond the work, in square roots of the work."""


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
class _Times(Forecaster[Any]):
    """Another forecaster's growth, times a factor."""

    inner: Forecaster[Any]
    factor: float

    def begin(self) -> Any:
        return self.inner.begin()

    def update(self, state: Any, time_s: float, level: float, lead_s: float) -> Any:
        return self.inner.update(state, time_s, level, lead_s)

    def growth(self, state: Any, lead_s: float) -> float:
        return self.inner.growth(state, lead_s) * self.factor


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
        """Replay under one planner, as the names that `--compare-planners` takes."""
        kind, _, knob = name.partition(":")
        if kind == FIXED:
            return self.fixed(int(knob), trace) if knob else self._smallest(trace)
        if kind == CLAIRVOYANT:
            return self._best_schedule(trace)
        if self._is_peer(kind):
            wanted = PEERS[kind].default if not knob else None if knob == BEST else float(knob)
            return self._best_peer(kind, trace) if wanted is None else self.peer(
                kind, wanted, trace
            )  # fmt: skip
        return self._planned(name, self._config(name), trace)

    def ours(
        self, headroom: float, trace: Sequence[TraceRequest], attainment: float | None = None
    ) -> PlanReport:
        """Replay under the file's own planner, whose forecasts count ``1 + headroom`` times.

        ``attainment``: what is asked, instead of what the file says.
        """
        config = self._config(OURS)
        if attainment is not None:
            config = evolve(config, targets=evolve(config.targets, attainment=attainment))
        return self._planned(OURS, config, trace, 1 + headroom)

    def _planned(
        self, name: str, config: PlannerConfig, trace: Sequence[TraceRequest], factor: float = 1.0
    ) -> PlanReport:
        makers, performance = self._roles()
        policy = self._policy(config, PlannerContext(performance=performance), factor)
        planner = FleetPlanner(config, performance, policy)
        fleet = self.replays.fleet(roles=self._has_roles)
        tuning = self._tuning(config, trace)
        planning = Planning(
            planner=planner,
            config=config,
            make_engine=makers,
            may_become=self._may_become() if self._has_roles else {},
            tuning=tuning,
        )
        report = self._report(name, trace, planning, fleet)
        if tuning is None:
            return report
        return evolve(report, tuning=tuning.steps, tuned=tuning.values)

    def _policy(
        self, config: PlannerConfig, context: PlannerContext, factor: float
    ) -> PlannerPolicy[Any]:
        """``factor``: how many times the forecasts of the planner `slo` count."""
        if factor == 1.0:
            host = self.replays.loaded.host
            return host.planners.kinds[config.kind].thing(config, context)
        if not isinstance(config, SloConfig):
            raise ConfigError([f"planner.kind: {config.kind} has no forecasts"], self.replays.file)
        return Slo(config, context, forecaster=_Times(forecaster_of(config), factor))

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
        makers, performance = self._roles()
        (role,) = performance
        bounds = evolve(self.config.bounds, **{role.value: (workers, workers)})
        config = evolve(self.config, bounds=bounds, budget=type(self.config.budget)())
        planner = FleetPlanner(config, performance, _Constant(role, workers))
        planning = Planning(planner=planner, config=config, make_engine=makers)
        fleet = _fleet(workers, makers[role], role)
        return self._report(f"{FIXED}:{workers}", trace, planning, fleet)

    def peer(self, kind: str, knob: float, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under a planner of another project, with this value of its knob."""
        ((_, performance),) = self._roles()[1].items()
        peer = PEERS[kind].make(knob, performance, self.config.targets)
        return self._with(f"{kind}:{knob:.3g}", peer, trace, None)

    def schedule(self, margin: float, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under a schedule made from the trace; ``margin`` is that of ``Schedule``.

        The first workers are ready when the trace begins.
        """
        ((_, performance),) = self._roles()[1].items()
        work = work_by_second(trace, performance)

        def make() -> Schedule:
            return Schedule(margin, work, self.config.start_up_s)

        return self._with(CLAIRVOYANT, make(), trace, make().workers_at(0.0))

    def _with(
        self, name: str, peer: Peer, trace: Sequence[TraceRequest], first: int | None
    ) -> PlanReport:
        """Replay under a peer, beginning with the file's workers, or with ``first``."""
        makers, performance = self._roles()
        (role,) = performance
        config = evolve(self.config, interval_s=peer.interval_s)
        planning = Planning(
            planner=PeerPlanner(peer, config, role), config=config, make_engine=makers
        )
        fleet = self.replays.fleet(roles=False)
        if first is not None:
            fleet = _fleet(first, makers[role], role)
        return self._report(name, trace, planning, fleet)

    def _best_peer(self, kind: str, trace: Sequence[TraceRequest]) -> PlanReport:
        """The cheapest of the replays tried that attained the targets, or the one that did best."""
        one = PEERS[kind]
        low, high = math.log(one.least), math.log(one.most)
        tried: list[PlanReport] = []
        for _ in range(_KNOBS_TRIED):
            middle = (low + high) / 2
            tried.append(self.peer(kind, math.exp(middle), trace))
            attains = tried[-1].attained >= self.config.targets.attainment
            low, high = (middle, high) if attains else (low, middle)
        return self._cheapest(tried)

    def _best_schedule(self, trace: Sequence[TraceRequest]) -> PlanReport:
        low, high = -1.0, _MOST_MARGIN
        tried: list[PlanReport] = []
        for _ in range(_KNOBS_TRIED):
            middle = (low + high) / 2
            tried.append(self.schedule(middle, trace))
            attains = tried[-1].attained >= self.config.targets.attainment
            low, high = (low, middle) if attains else (middle, high)
        return self._cheapest(tried)

    def _cheapest(self, tried: Sequence[PlanReport]) -> PlanReport:
        able = [one for one in tried if one.attained >= self.config.targets.attainment]
        if able:
            return min(able, key=lambda one: one.worker_hours)
        return max(tried, key=lambda one: one.attained)

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

    def _may_become(self) -> Mapping[Role, Collection[Role]]:
        """The roles that a worker could have instead: those of entries that differ in no more."""
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
        (role,) = self._roles()[1]
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

    def _is_peer(self, kind: str) -> bool:
        """Whether the name means a peer: a planner that is installed comes first."""
        return kind in PEERS and kind not in self.replays.loaded.host.planners.kinds

    def _check(self, name: str, option: str) -> None:
        kind, _, knob = name.partition(":")
        known = kind in (FIXED, CLAIRVOYANT) or self._is_peer(kind)
        if kind == FIXED and name != FIXED and not (knob.isdecimal() and int(knob)):
            raise ConfigError([f"{name}: expected {FIXED}:N with N workers"], option)
        if kind in PEERS and known and name != kind and knob != BEST and not _is_positive(knob):
            problem = f"{name}: expected {kind}, {kind}:{BEST}, or {kind}:X with X above 0"
            raise ConfigError([problem], option)
        if known and len(self._roles()[1]) > 1:
            raise ConfigError([f"{name}: needs workers of one role only"], option)
        if not known or (name.partition(":")[1] and kind == CLAIRVOYANT):
            self._config(name, option)

    def _config(self, name: str, option: str = "--compare-planners") -> PlannerConfig:
        """The file's own options, or those that all planners share for another planner."""
        if name in (self.config.kind, OURS):
            return self.config
        kind = self.replays.loaded.host.planners.kinds.get(name)
        if kind is None:
            known = sorted(self.replays.loaded.host.planners.kinds)
            names = ", ".join([*known, OURS, FIXED, f"{FIXED}:N", CLAIRVOYANT, *PEERS])
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

    def _report(
        self,
        name: str,
        trace: Sequence[TraceRequest],
        planning: Planning,
        fleet: Sequence[VirtualWorker],
    ) -> PlanReport:
        outcome = self.replays.planned(trace, planning, fleet)
        return _plan_report(name, outcome, self.config)


def work_by_second(trace: Sequence[TraceRequest], performance: EnginePerformance) -> list[float]:
    """Seconds of a full worker that arrive in each second, where no prompt is computed twice."""
    begun_s = trace[0].timestamp / 1000
    work = [0.0] * (math.ceil(trace[-1].timestamp / 1000 - begun_s) + 1)
    seen: set[int] = set()
    for one in trace:
        blocks = one.full_blocks
        cached = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        tokens = one.input_length - cached * one.block_tokens
        second = int(one.timestamp / 1000 - begun_s)
        work[second] += performance.work_s(tokens, one.output_length)
    return work


def _fleet(workers: int, make: Callable[[], VirtualEngine], role: Role) -> list[VirtualWorker]:
    return [VirtualWorker.make(f"worker-{number:03}", make(), role) for number in range(workers)]


def _is_positive(written: str) -> bool:
    try:
        return 0 < float(written) < math.inf
    except ValueError:
        return False


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
